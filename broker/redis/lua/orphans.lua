#!lua flags=allow-oom
-- Finds entries that were delivered and that nobody has, because somebody deleted a consumer with its pending entries,
-- and returns them. Only for a stream whose acknowledged entries are removed: in another one they cannot be told apart.
--
-- KEYS  stream
-- ARGV  group, name of the consumer of returned entries, where to begin, how many entries to look at
-- Returns where to go on ("": nowhere), and how many were found.
local stream, group, returned, from, limit = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local groups = redis.call('XINFO', 'GROUPS', stream)
if #groups ~= 1 then return {'', 0} end
local g = {}
for i = 1, #groups[1], 2 do g[groups[1][i]] = groups[1][i + 1] end
if g.name ~= group then return {'', 0} end
local entries = redis.call('XRANGE', stream, from, g['last-delivered-id'], 'COUNT', limit)
local found = 0
for _, e in ipairs(entries) do
  if #redis.call('XPENDING', stream, group, e[1], e[1], 1) == 0 then
    redis.call('XCLAIM', stream, group, returned, 0, e[1], 'RETRYCOUNT', 1, 'FORCE', 'JUSTID')
    found = found + 1
  end
end
if #entries < limit then return {'', found} end
return {'(' .. entries[#entries][1], found}
