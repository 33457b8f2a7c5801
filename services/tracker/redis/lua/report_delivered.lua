-- Merges what a gateway delivered. Returns {unknown ids, stale ids}.
local function is_foreign(record)
  return record.gateway_id ~= call.gateway_id
    or tonumber(record.gateway_epoch) > tonumber(call.gateway_epoch)
end

return merge(is_foreign, function(record, entry)
  record.gateway_epoch = call.gateway_epoch
  advance(record, 'num_delivered', 'delivered_at_s', entry.num_delivered)
end)
