#!lua flags=allow-oom
-- Puts entries that are still this consumer's back, without counting that they were delivered to it.
--
-- KEYS  stream
-- ARGV  group, consumer, name of the consumer of returned entries, ids …
-- Returns the places of the ids that are not this consumer's, and as the last number how many of those nobody has although
-- they are in the stream.
local stream, group, me, returned = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local others, orphans = {}, 0
for i = 4, #ARGV do
  local id = ARGV[i]
  local row = redis.call('XPENDING', stream, group, id, id, 1, me)[1]
  if row then
    redis.call('XCLAIM', stream, group, returned, 0, id, 'RETRYCOUNT', math.max(0, row[4] - 1), 'JUSTID')
  else
    others[#others + 1] = i - 3
    if #redis.call('XPENDING', stream, group, id, id, 1) == 0 and #redis.call('XRANGE', stream, id, id) > 0 then
      orphans = orphans + 1
    end
  end
end
others[#others + 1] = orphans
return others
