-- Sets the policy of a queue: the given keys, which are columns of tasklib.queues. A key that is null removes that limit; a key that
-- is left out stays as it is. A queue that has no row gets one. Without rate_limit there is no rate, and without breaker_failures
-- and breaker_share there is no breaker: to remove the key removes what belongs to it.
--
-- Security definer, as the other functions for operators: who may change policies need not be able to write to the tables, and
-- cannot change what the audit says. An operator is granted this function.
--
--     select tasklib.set_queue('mail', '{"max_running": 10, "rate_limit": 100, "rate_seconds": 60}', 'new contract');
create or replace function tasklib.set_queue(name text, policy jsonb default '{}', reason text default null, actor text default null)
    returns tasklib.queues
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    known constant text[] := array[
        'max_running', 'max_per_worker', 'rate_limit', 'rate_seconds', 'rate_burst', 'breaker_failures', 'breaker_share',
        'breaker_window_seconds', 'breaker_open_seconds', 'breaker_probes', 'breaker_codes', 'ageing_seconds', 'rank', 'weight',
        'default_priority', 'default_max_retries', 'default_timeout_seconds', 'retention_days', 'audit'];
    before tasklib.queues;
    after tasklib.queues;
begin
    if policy - known <> '{}' then
        raise exception 'unknown key in set_queue: %', (select string_agg(key, ', ') from jsonb_object_keys(policy - known) as key)
            using errcode = 'TL400', hint = 'Known keys: ' || array_to_string(known, ', ') || '.';
    end if;
    insert into tasklib.queues (name) values (set_queue.name) on conflict do nothing;
    select * into before from tasklib.queues where name = set_queue.name for update;
    after := tasklib.whole_policy(jsonb_populate_record(before, policy), policy);
    if after = before then
        return before;
    end if;
    after.changed_at := clock_timestamp();
    after.changed_by := coalesce(set_queue.actor, tasklib.caller());
    update tasklib.queues as queue
       set (max_running, max_per_worker, rate_limit, rate_seconds, rate_burst, breaker_failures, breaker_share,
            breaker_window_seconds, breaker_open_seconds, breaker_probes, breaker_codes, ageing_seconds, rank, weight,
            default_priority, default_max_retries, default_timeout_seconds, retention_days, audit, changed_at, changed_by)
         = (after.max_running, after.max_per_worker, after.rate_limit, after.rate_seconds, after.rate_burst,
            after.breaker_failures, after.breaker_share, after.breaker_window_seconds, after.breaker_open_seconds,
            after.breaker_probes, after.breaker_codes, after.ageing_seconds, after.rank, after.weight, after.default_priority,
            after.default_max_retries, after.default_timeout_seconds, after.retention_days, after.audit, after.changed_at,
            after.changed_by)
     where queue.name = set_queue.name;
    perform tasklib.note_transition(
        'set_queue', null, set_queue.name, tasklib.changed_keys(to_jsonb(before), to_jsonb(after)),
        tasklib.changed_keys(to_jsonb(after), to_jsonb(before)), set_queue.reason, set_queue.actor);
    return after;
end
$$;
revoke all on function tasklib.set_queue(text, jsonb, text, text) from public;
