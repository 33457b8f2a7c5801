-- Put in front of every script. All keys belong to one executor and share one hash slot:
-- KEYS[1] lease hash, KEYS[2] index of requests by expiry, KEYS[3] hash of requests, each as JSON.
-- ARGV[1] is the call as JSON. Epochs and instants are strings there: they have more digits than Lua prints.
local LEASE, INDEX, RECORDS = KEYS[1], KEYS[2], KEYS[3]
local call = cjson.decode(ARGV[1])
local now_s = tonumber(call.now_s)

-- Returns why a writer of this epoch may not write, or nil if it holds the lease.
local function refusal(epoch)
  local stored = redis.call('HMGET', LEASE, 'epoch', 'expires_at_s')
  if not stored[1] then return 'LEASE_EXPIRED' end
  if tonumber(stored[1]) > tonumber(epoch) then return 'STALE_EPOCH' end
  if tonumber(stored[1]) < tonumber(epoch) then return 'LEASE_EXPIRED' end
  if tonumber(stored[2]) <= now_s then return 'LEASE_EXPIRED' end
  return nil
end

-- Returns the recorded fields of a request, or nil if it is unknown or has expired.
local function read(request_id)
  local stored = redis.call('HGET', RECORDS, request_id)
  local record = stored and cjson.decode(stored)
  if not record or tonumber(record.expires_at_s) <= now_s then return nil end
  return record
end

-- Stores the fields of a request, and renews its life according to its state.
local function write(request_id, record)
  record.expires_at_s = call.lives[record.state]
  redis.call('HSET', RECORDS, request_id, cjson.encode(record))
  redis.call('ZADD', INDEX, record.expires_at_s, request_id)
end

-- Has Redis drop the requests by itself once no script has touched them for that long.
local function keep()
  redis.call('PEXPIRE', INDEX, call.keep_ms)
  redis.call('PEXPIRE', RECORDS, call.keep_ms)
end

-- Takes over a count of tokens, and the instant of the call with it, unless it is no more than is known.
local function advance(record, count_name, instant_name, count)
  if count and (not record[instant_name] or count > tonumber(record[count_name])) then
    record[count_name], record[instant_name] = count, call.now_s
  end
end

-- Applies each entry of a report to its record, and stores that. Returns {unknown ids, stale ids}.
local function merge(is_foreign, apply)
  local unknown, stale = {}, {}
  for _, entry in ipairs(call.progress) do
    local record = read(entry.request_id)
    if not record or tonumber(record.generation) < entry.generation then
      table.insert(unknown, entry.request_id)
    elseif tonumber(record.generation) > entry.generation or is_foreign(record) then
      table.insert(stale, entry.request_id)
    else
      apply(record, entry)
      write(entry.request_id, record)
    end
  end
  keep()
  return {unknown, stale}
end
