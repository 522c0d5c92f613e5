#!lua flags=allow-oom
-- Begins a consumer.
--
-- KEYS  the group's hash of consumers, streams …
-- ARGV  group, consumer, its handler timeout, its idle deadline
-- Returns the server's time in milliseconds.
for s = 2, #KEYS do redis.call('XGROUP', 'CREATECONSUMER', KEYS[s], ARGV[1], ARGV[2]) end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[2], string.format('%d %d %d', ARGV[3], ARGV[4], now))
return {now}
