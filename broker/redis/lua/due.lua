#!lua flags=allow-oom
-- Moves messages whose time has come to the stream that they came from. What is added is taken away in the same step, so
-- that it goes on while the server is out of memory.
--
-- KEYS  the stream they go to, the other streams that are read …, hold queues …
-- ARGV  group, name of the consumer of returned entries, how many streams there are, how many to move at most
-- Returns how many were moved, in how many milliseconds the next is due (-1: none waits), and whether there are returned
-- entries.
local group, returned, streams, left = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) -- down, so that nothing is due early
local moved, soonest = 0, -1
for k = streams + 1, #KEYS do
  if left > moved then
    local due = redis.call('ZRANGE', KEYS[k], '-inf', string.format('%d', now), 'BYSCORE', 'LIMIT', 0, left - moved)
    local failed
    for i = 1, #due do
      local added = redis.pcall('XADD', KEYS[1], '*', unpack(cmsgpack.unpack(string.sub(due[i], 18))))
      if type(added) == 'table' and added.err then
        failed = added
        for j = #due, i, -1 do due[j] = nil end
        break
      end
    end
    if #due > 0 then redis.call('ZREM', KEYS[k], unpack(due)) end
    if failed then return failed end
    moved = moved + #due
  end
  local first = redis.call('ZRANGE', KEYS[k], 0, 0, 'WITHSCORES')
  if first[2] then
    local wait = math.max(0, first[2] - now)
    if soonest < 0 or wait < soonest then soonest = wait end
  end
end
local waiting = 0
for s = 1, streams do
  if #redis.call('XPENDING', KEYS[s], group, '-', '+', 1, returned) > 0 then waiting = 1 end
end
return {moved, soonest, waiting}
