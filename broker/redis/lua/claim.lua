#!lua flags=allow-oom
-- Takes returned entries, oldest first. Each counts as one more delivery. Entries that somebody deleted meanwhile leave
-- the list of pending ones, and are lost.
--
-- KEYS  streams …
-- ARGV  group, consumer, name of the consumer of returned entries, how many at most
-- Returns how many are lost, then for each entry: the place of its stream in KEYS, its id, how often it was delivered,
-- its fields.
local group, me, returned, left = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local lost, out = 0, {0}
for s = 1, #KEYS do
  if left <= 0 then break end
  local rows = redis.call('XPENDING', KEYS[s], group, '-', '+', left, returned)
  if #rows > 0 then
    local ids, count = {}, {}
    for i, row in ipairs(rows) do
      ids[i] = row[1]
      count[row[1]] = row[4] + 1
    end
    local got = redis.call('XCLAIM', KEYS[s], group, me, 0, unpack(ids))
    for _, entry in ipairs(got) do
      out[#out + 1] = {s, entry[1], count[entry[1]], entry[2]}
    end
    lost = lost + #rows - #got
    left = left - #got
  end
end
out[1] = lost
return out
