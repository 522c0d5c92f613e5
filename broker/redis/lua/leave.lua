#!lua flags=allow-oom
-- Ends a consumer: what it has goes back, and its name goes away once it has nothing, in the same step, because deleting
-- a consumer destroys its list of pending entries.
--
-- KEYS  the group's hash of consumers, streams …
-- ARGV  group, consumer, name of the consumer of returned entries, how many to move at most
-- Returns whether there is more to move, and how many entries were deleted from the stream and are lost.
local group, me, returned, left = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local lost, more = 0, 0
for s = 2, #KEYS do
  local rows = redis.pcall('XPENDING', KEYS[s], group, '-', '+', left, me)
  if not rows.err then
    if #rows > 0 then
      local ids = {}
      for i, row in ipairs(rows) do ids[i] = row[1] end
      ids[#rows + 1] = 'JUSTID'
      lost = lost + #rows - #redis.call('XCLAIM', KEYS[s], group, returned, 0, unpack(ids))
    end
    if #redis.call('XPENDING', KEYS[s], group, '-', '+', 1, me) > 0 then
      more = 1
    else
      redis.call('XGROUP', 'DELCONSUMER', KEYS[s], group, me)
    end
  end
end
if more == 0 then redis.call('HDEL', KEYS[1], me) end
return {more, lost}
