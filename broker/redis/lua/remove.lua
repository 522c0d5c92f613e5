-- remove takes acknowledged entries, in ascending order, out of a stream that is ours alone. Deleting each costs more than
-- the rest of a settlement; where all of them lie below everything that is still pending they are cut off together. That
-- takes away whatever lies there, so that it is done only where the server's numbers say that nothing else does: an entry
-- that nobody has, because somebody deleted its consumer, has to stay to be found.
--
-- It returns how many entries went that should not have, should those numbers have been wrong.
local function remove(stream, group, ids, from, to)
  local groups = redis.call('XINFO', 'GROUPS', stream)
  if #groups ~= 1 then return 0 end
  local n = to - from + 1
  local g = {}
  for i = 1, #groups[1], 2 do g[groups[1][i]] = groups[1][i + 1] end
  if n >= 8 and type(g.lag) == 'number' and redis.call('XLEN', stream) == g.lag + g.pending + n then
    local function split(id)
      local ms, seq = string.match(id, '^(%d+)-(%d+)$')
      return tonumber(ms), tonumber(seq)
    end
    local ms, seq = split(ids[to])
    local floor, below = string.format('%.0f-%.0f', ms, seq + 1), n
    if g.pending > 0 then
      floor = redis.call('XPENDING', stream, group)[2]
      local fms, fseq = split(floor)
      local low, high = from, to + 1 -- the first that is not below the first pending one
      while low < high do
        local mid = math.floor((low + high) / 2)
        ms, seq = split(ids[mid])
        if ms < fms or ms == fms and seq < fseq then low = mid + 1 else high = mid end
      end
      below = low - from
      ms, seq = split(ids[to])
      if below == n then floor = string.format('%.0f-%.0f', ms, seq + 1) end
    end
    if below >= 8 and seq < 2 ^ 52 and ms < 2 ^ 52 then
      local cut = redis.call('XTRIM', stream, 'MINID', '=', floor)
      if below < n then redis.call('XDEL', stream, unpack(ids, from + below, to)) end
      return math.max(0, cut - below)
    end
  end
  redis.call('XDEL', stream, unpack(ids, from, to))
  return 0
end

