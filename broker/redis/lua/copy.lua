#!lua
-- Writes copies of entries that are still this consumer's, and acknowledges each original in the same step. A server
-- that is out of memory refuses the whole script before it does anything.
--
-- KEYS  stream, targets …
-- ARGV  group, consumer, mode (as in settle.lua), then in the order of the ids for each copy: id, target (its place in
--       KEYS), delay (milliseconds to hold it for, or -1 to append it), the copy (to append: its fields, packed; to hold:
--       a unique prefix before that)
-- Returns for each copy 1 (done), 0 (the entry is not this consumer's), -1 (nor anybody's, although it is in the stream)
-- or the text of an error; then how many other entries were lost.
local stream, group, me, mode = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.ceil(time[2] / 1000) -- up, so that nothing is due early
local n = (#ARGV - 3) / 4
local mine = {}
for _, row in ipairs(redis.call('XPENDING', stream, group, ARGV[4], ARGV[#ARGV - 3], 2 * n + 16, me)) do
  mine[row[1]] = true
end
local out, done = {}, {}
for c = 1, n do
  local i = 4 * c
  local id, target, delay, copy = ARGV[i], KEYS[tonumber(ARGV[i + 1])], tonumber(ARGV[i + 2]), ARGV[i + 3]
  if not mine[id] and #redis.call('XPENDING', stream, group, id, id, 1, me) == 0 then
    local orphan = #redis.call('XPENDING', stream, group, id, id, 1) == 0 and #redis.call('XRANGE', stream, id, id) > 0
    out[c] = orphan and -1 or 0
  else
    local stored
    if delay < 0 then
      stored = redis.pcall('XADD', target, '*', unpack(cmsgpack.unpack(copy)))
    else
      stored = redis.pcall('ZADD', target, now + delay, copy)
    end
    if type(stored) == 'table' and stored.err then
      out[c] = stored.err
    else
      out[c] = 1
      done[#done + 1] = id
    end
  end
end
if #done > 0 then
  if mode == 'ackdel' then
    redis.call('XACKDEL', stream, group, 'ACKED', 'IDS', #done, unpack(done))
  else
    redis.call('XACK', stream, group, unpack(done))
    if mode == 'delete' then out[n + 1] = remove(stream, group, done, 1, #done) end
  end
end
return out
