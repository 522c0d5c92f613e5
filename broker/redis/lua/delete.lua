#!lua flags=allow-oom
-- Deletes a queue with what belongs to it.
--
-- KEYS  stream or sorted set, registry of queues, the group's hash of consumers, streams that it may follow …
-- ARGV  group
-- Returns how many messages were in it.
local kind = redis.call('TYPE', KEYS[1]).ok
local n = 0
if kind == 'stream' then n = redis.call('XLEN', KEYS[1]) end
if kind == 'zset' then n = redis.call('ZCARD', KEYS[1]) end
if kind == 'stream' or kind == 'zset' then redis.call('UNLINK', KEYS[1]) end
if redis.call('HGET', KEYS[2], KEYS[1]) == 'reader' then
  for k = 4, #KEYS do
    if redis.call('TYPE', KEYS[k]).ok == 'stream' then redis.call('XGROUP', 'DESTROY', KEYS[k], ARGV[1]) end
  end
end
redis.call('HDEL', KEYS[2], KEYS[1])
if kind ~= 'zset' then redis.call('UNLINK', KEYS[3]) end
return {n}
