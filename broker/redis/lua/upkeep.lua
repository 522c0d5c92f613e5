#!lua flags=allow-oom
-- What each consumer does every second or so: it shows that it lives, returns what others hold that are dead or too slow,
-- and trims a stream that several groups read.
--
-- A consumer's field in the hash is "handler timeout, idle deadline, when it was last seen", all in milliseconds. Fields
-- that begin with # are about the group.
--
-- KEYS  the group's hash of consumers, streams …
-- ARGV  group, consumer, name of the consumer of returned entries, its handler timeout, its idle deadline, after how long
--       a silent consumer is dead (0: do not judge now), how many entries to return at most, streams to trim (a bit each),
--       how often to look after the others
-- Returns 0 where this consumer was taken for dead and has to begin anew, else the server's time; then how many entries were returned, how
-- many are lost because they were deleted, and the place of a stream in which a consumer's name was deleted (0: none).
local hash, group, me, returned = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local timeout, deadline, silence, left, trim = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
if redis.call('HEXISTS', hash, me) == 0 then return {0} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', hash, me, string.format('%d %d %d', timeout, deadline, now))

-- However many consumers there are, one of them looks after the others.
local looked = tonumber(redis.call('HGET', hash, '#looked') or '0')
if now >= looked and now - looked < tonumber(ARGV[9]) then return {now, 0, 0, 0} end
if silence > 0 then redis.call('HSET', hash, '#looked', string.format('%d', now)) end

local known = {} -- name -> {idle deadline, last seen}
local flat = redis.call('HGETALL', hash)
for i = 1, #flat, 2 do
  local d, seen = string.match(flat[i + 1], '^%d+ (%d+) (%d+)$')
  if d and string.sub(flat[i], 1, 1) ~= '#' then known[flat[i]] = {tonumber(d), tonumber(seen)} end
end

local moved, lost, orphaned = 0, 0, 0
local holds = {} -- names that still have something
for s = 2, #KEYS do
  local stream, there = KEYS[s], {}
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
    local c = {}
    for i = 1, #info, 2 do c[info[i]] = info[i + 1] end
    there[c.name] = true
    if c.pending > 0 and c.name ~= returned and left > moved then
      local idle, k = deadline, known[c.name]
      if k then
        idle = k[1]
        if silence > 0 and now - k[2] > silence then idle = 0 end
      end
      local rows = redis.call('XPENDING', stream, group, 'IDLE', idle, '-', '+', left - moved, c.name)
      if #rows > 0 then
        local ids = {}
        for i, row in ipairs(rows) do ids[i] = row[1] end
        ids[#rows + 1] = 'JUSTID'
        local got = redis.call('XCLAIM', stream, group, returned, idle, unpack(ids))
        moved = moved + #got
        lost = lost + #rows - #got
      end
      if #redis.call('XPENDING', stream, group, '-', '+', 1, c.name) > 0 then holds[c.name] = true end
    end
    if c.pending > 0 and left <= moved then holds[c.name] = true end
  end
  for name in pairs(known) do
    if not there[name] then -- somebody deleted the name, and with it the list of what it had
      redis.call('XGROUP', 'CREATECONSUMER', stream, group, name)
      orphaned = s - 1
    end
  end
end

if silence > 0 and orphaned == 0 then
  for name, k in pairs(known) do
    if now - k[2] > silence and not holds[name] then
      for s = 2, #KEYS do redis.call('XGROUP', 'DELCONSUMER', KEYS[s], group, name) end
      redis.call('HDEL', hash, name)
    end
  end
end

for s = 2, #KEYS do
  -- The place from which to go on should the group be destroyed: below everything that is not acknowledged.
  local floor, groups = nil, 0
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[s])) do
    local g = {}
    for i = 1, #info, 2 do g[info[i]] = info[i + 1] end
    local lowest = g['last-delivered-id']
    if g.pending > 0 then lowest = redis.call('XPENDING', KEYS[s], g.name)[2] end
    groups = groups + 1
    if g.name == group then redis.call('HSET', hash, '#floor:' .. KEYS[s], lowest .. (g.pending > 0 and ' pending' or ' read')) end
    local function below(a, b)
      local am, an = string.match(a, '^(%d+)-(%d+)$')
      local bm, bn = string.match(b, '^(%d+)-(%d+)$')
      if am ~= bm then return tonumber(am) < tonumber(bm) end
      return tonumber(an) < tonumber(bn)
    end
    if not floor or below(lowest, floor) then floor = lowest end
  end
  if math.floor(trim / 2 ^ (s - 2)) % 2 == 1 and groups > 1 then
    redis.call('XTRIM', KEYS[s], 'MINID', '=', floor)
  end
end
if lost > 0 then redis.call('HSET', hash, '#lost', string.format('%d', now)) end
return {now, moved, lost, orphaned}
