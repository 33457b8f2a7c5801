-- Merges what an executor generated. Returns {status, unknown ids, stale ids, ids of illegal transitions}.
local refused = refusal(call.epoch)
if refused then return {refused, {}, {}, {}} end

local illegal = {}

local function is_foreign(record)
  return tonumber(record.executor_epoch) > tonumber(call.epoch)
end

local refusals = merge(is_foreign, function(record, entry)
  record.executor_epoch = call.epoch
  local state = entry.state or record.state
  if state ~= record.state then
    if call.edges[record.state][state] then
      record.state = state
    else
      table.insert(illegal, entry.request_id)
    end
  end
  advance(record, 'num_generated', 'generated_at_s', entry.num_generated)
end)
return {'OK', refusals[1], refusals[2], illegal}
