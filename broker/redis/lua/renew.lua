#!lua flags=allow-oom
-- Renews the leases of entries that are still this consumer's, without counting a delivery.
--
-- KEYS  stream
-- ARGV  group, consumer, ids in ascending order …
-- Returns how many are not this consumer's (any more), how many of those nobody has although they are in the stream, and
-- how many were deleted from the stream: those are lost, unless their handler succeeds.
local stream, group, me = KEYS[1], ARGV[1], ARGV[2]
local n = #ARGV - 2
local mine = {}
for _, row in ipairs(redis.call('XPENDING', stream, group, ARGV[3], ARGV[#ARGV], 2 * n + 16, me)) do
  mine[row[1]] = true
end
local ids, others, orphans = {}, 0, 0
for i = 3, #ARGV do
  local id = ARGV[i]
  if mine[id] or #redis.call('XPENDING', stream, group, id, id, 1, me) > 0 then
    ids[#ids + 1] = id
  else
    others = others + 1
    if #redis.call('XPENDING', stream, group, id, id, 1) == 0 and #redis.call('XRANGE', stream, id, id) > 0 then
      orphans = orphans + 1
    end
  end
end
local deleted = 0
if #ids > 0 then
  local n = #ids
  ids[n + 1] = 'JUSTID'
  deleted = n - #redis.call('XCLAIM', stream, group, me, 0, unpack(ids))
end
return {others, orphans, deleted}
