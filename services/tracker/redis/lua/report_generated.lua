-- Merges what an executor generated. Returns {status, unknown ids, stale ids, ids of illegal transitions}.
local refused = refusal(call.epoch)
if refused then return {refused, {}, {}, {}} end

local unknown, stale, illegal = {}, {}, {}

local function apply(record, entry)
  record.executor_epoch = call.epoch
  local state = entry.state or record.state
  if state ~= record.state then
    if call.reachable[record.state][state] then
      record.state = state
    else
      table.insert(illegal, entry.request_id)
    end
  end
  local count = entry.num_generated
  if count and (not record.generated_at_s or count > tonumber(record.num_generated)) then
    record.num_generated, record.generated_at_s = count, call.now_s
  end
  write(entry.request_id, record)
end

for _, entry in ipairs(call.progress) do
  local record = read(entry.request_id)
  if not record or tonumber(record.generation) < entry.generation then
    table.insert(unknown, entry.request_id)
  elseif tonumber(record.generation) > entry.generation
    or tonumber(record.executor_epoch) > tonumber(call.epoch) then
    table.insert(stale, entry.request_id)
  else
    apply(record, entry)
  end
end
keep()
return {'OK', unknown, stale, illegal}
