#!lua flags=allow-oom
-- Acknowledges entries that are still this consumer's, and removes them from a stream that is ours alone. It must work
-- while the server is out of memory: it is what frees some.
--
-- KEYS  stream
-- ARGV  group, consumer, mode (keep | delete | ackdel), ids in ascending order …
-- Returns the places (from 1) in the list of ids of those that are not this consumer's, and as the last number how many
-- of those nobody has although they are in the stream; negative: how many others were lost.
local stream, group, me, mode = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local first, last = 4, #ARGV
local others, orphans = {}, 0

-- Mostly they are all there is between the first and the last of them.
local rows = redis.call('XPENDING', stream, group, ARGV[first], ARGV[last], last - first + 1, me)
local ids, from, to = ARGV, first, last
local same = #rows == last - first + 1
if same then
  for i = 1, #rows do
    if rows[i][1] ~= ARGV[i + 3] then same = false break end
  end
end
if not same then
  local mine = {}
  for i = 1, #rows do mine[rows[i][1]] = true end
  ids, from, to = {}, 1, 0
  for i = first, last do
    local id = ARGV[i]
    if mine[id] or #redis.call('XPENDING', stream, group, id, id, 1, me) > 0 then
      to = to + 1
      ids[to] = id
    else
      others[#others + 1] = i - 3
      if #redis.call('XPENDING', stream, group, id, id, 1) == 0 and #redis.call('XRANGE', stream, id, id) > 0 then
        orphans = orphans + 1
      end
    end
  end
end

if to >= from then
  if mode == 'ackdel' then -- Redis 8.2: deletes what every group has acknowledged
    redis.call('XACKDEL', stream, group, 'ACKED', 'IDS', to - from + 1, unpack(ids, from, to))
  else
    redis.call('XACK', stream, group, unpack(ids, from, to))
    if mode == 'delete' then
      local lost = remove(stream, group, ids, from, to)
      if lost > 0 then orphans = -lost end
    end
  end
end
others[#others + 1] = orphans
return others
