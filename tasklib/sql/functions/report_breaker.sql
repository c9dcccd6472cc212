-- Tells a queue's breaker how attempts ended that began in this epoch: workers do so once a second, and at once while it is half
-- open. Attempts of another epoch say nothing about now, and are ignored. Closed, it opens when enough attempts of its window have
-- failed, by count (breaker_failures) or by share (breaker_share, of at least 10 attempts). Half open, one failure opens it again,
-- and as many successes as it has probes close it.
create or replace function tasklib.report_breaker(queue text, epoch bigint, succeeded bigint, failed bigint) returns text
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    policy tasklib.queues;
    breaker tasklib.breakers;
    now timestamptz;
    became text;
begin
    select * into policy from tasklib.queues as row where row.name = report_breaker.queue;
    if policy.name is null or num_nonnulls(policy.breaker_failures, policy.breaker_share) = 0 then
        return null;
    end if;
    insert into tasklib.breakers (queue) values (report_breaker.queue) on conflict do nothing;
    select * into breaker from tasklib.breakers as row where row.queue = report_breaker.queue for update;
    now := clock_timestamp();
    if breaker.epoch <> epoch then
        return breaker.state;
    end if;
    if breaker.state = 'closed' and breaker.since + policy.breaker_window_seconds * interval '1 second' < now then
        -- A new window. What came before counts for half, so that a fault at the turn is not overlooked.
        breaker.succeeded := breaker.succeeded / 2;
        breaker.failed := breaker.failed / 2;
        breaker.since := now;
    end if;
    breaker.succeeded := breaker.succeeded + succeeded;
    breaker.failed := breaker.failed + failed;
    if breaker.state = 'open' then
        became := case when failed > 0 then 'open' when breaker.succeeded >= policy.breaker_probes then 'closed' end;
    elsif breaker.failed >= policy.breaker_failures
          or breaker.succeeded + breaker.failed >= 10
             and breaker.failed >= policy.breaker_share * (breaker.succeeded + breaker.failed) then
        became := 'open';
    end if;
    if became is null then
        update tasklib.breakers as row
           set succeeded = breaker.succeeded, failed = breaker.failed, since = breaker.since
         where row.queue = report_breaker.queue;
        return breaker.state;
    end if;
    update tasklib.breakers as row
       set state = became, epoch = row.epoch + 1, succeeded = 0, failed = 0, since = now,
           open_until = case when became = 'open' then now + policy.breaker_open_seconds * interval '1 second' end
     where row.queue = report_breaker.queue;
    if became = 'closed' then
        perform tasklib.ring(queue);
    end if;
    return became;
end
$$;
