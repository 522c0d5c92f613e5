#!lua flags=no-writes
-- Counts entries without sending them.
--
-- KEYS  stream
-- ARGV  from, to, how many at most
-- Returns how many there are and the id of the last one.
local entries = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])
return {#entries, #entries > 0 and entries[#entries][1] or ''}
