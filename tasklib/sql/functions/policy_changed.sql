-- Every change of a queue's policy raises the version that workers compare, and rings, so that a worker that sleeps hears of a queue
-- that was resumed or may run more. A policy that older workers do not know switches its feature on; the last one that goes
-- switches it off. From the first one that concerns submits, these look at the queues: see the sequence submit_rules.
create or replace function tasklib.policy_changed() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if tg_op <> 'DELETE' and num_nonnulls(
        new.paused_at, new.max_running, new.max_per_worker, new.rate_limit, new.breaker_failures, new.breaker_share,
        new.ageing_seconds) > 0
    then
        perform tasklib.use_feature('policies');
    end if;
    if tg_op <> 'DELETE'
       and (new.audit or num_nonnulls(new.default_priority, new.default_max_retries, new.default_timeout_seconds) > 0)
    then
        perform setval('tasklib.submit_rules', 1);
    end if;
    update tasklib.policy
       set version = version + 1,
           features = case when cluster_wide_cap is null and not exists (
                                    select from tasklib.queues as queue
                                     where num_nonnulls(
                                         queue.paused_at, queue.max_running, queue.max_per_worker, queue.rate_limit,
                                         queue.breaker_failures, queue.breaker_share, queue.ageing_seconds) > 0)
                           then array_remove(features, 'policies') else features end;
    perform tasklib.ring(coalesce(new.name, old.name));
    return null;
end
$$;
revoke all on function tasklib.policy_changed() from public;

create or replace trigger policy_changed after insert or update or delete on tasklib.queues
    for each row execute function tasklib.policy_changed();

create or replace function tasklib.policy_row_changed() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if new.refuses_unknown_queues then
        perform setval('tasklib.submit_rules', 1);
    end if;
    new.version := old.version + 1;
    return new;
end
$$;
revoke all on function tasklib.policy_row_changed() from public;

create or replace trigger policy_row_changed before update on tasklib.policy
    for each row when (new.version = old.version) execute function tasklib.policy_row_changed();

-- Rows that came without their triggers, as by logical replication.
do $$
begin
    if exists (select from tasklib.queues
                where audit or num_nonnulls(default_priority, default_max_retries, default_timeout_seconds) > 0)
       or (select refuses_unknown_queues from tasklib.policy)
    then
        perform setval('tasklib.submit_rules', 1);
    end if;
end
$$;
