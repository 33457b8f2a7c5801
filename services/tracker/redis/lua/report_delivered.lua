-- Merges what a gateway delivered. Returns {unknown ids, stale ids}.
local unknown, stale = {}, {}

local function apply(record, entry)
  record.gateway_epoch = call.gateway_epoch
  local count = entry.num_delivered
  if count and (not record.delivered_at_s or count > tonumber(record.num_delivered)) then
    record.num_delivered, record.delivered_at_s = count, call.now_s
  end
  write(entry.request_id, record)
end

for _, entry in ipairs(call.progress) do
  local record = read(entry.request_id)
  if not record or tonumber(record.generation) < entry.generation then
    table.insert(unknown, entry.request_id)
  elseif tonumber(record.generation) > entry.generation
    or record.gateway_id ~= call.gateway_id
    or tonumber(record.gateway_epoch) > tonumber(call.gateway_epoch) then
    table.insert(stale, entry.request_id)
  else
    apply(record, entry)
  end
end
keep()
return {unknown, stale}
