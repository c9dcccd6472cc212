-- A queue's policy with everything that belongs together: `given` has just been set in it. A rate has a limit and a period. A breaker
-- has what opens it, and defaults for the rest. A part whose whole is missing is refused, and goes when the whole is removed.
create or replace function tasklib.whole_policy(policy tasklib.queues, given jsonb) returns tasklib.queues
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    if policy.rate_limit is null then
        if coalesce(given ->> 'rate_seconds', given ->> 'rate_burst') is not null then
            raise exception 'rate_seconds and rate_burst need rate_limit' using errcode = 'TL400';
        end if;
        policy.rate_seconds := null;
        policy.rate_burst := null;
    elsif policy.rate_seconds is null then
        raise exception 'rate_limit needs rate_seconds, the period in which so many tasks may start' using errcode = 'TL400';
    end if;
    if num_nonnulls(policy.breaker_failures, policy.breaker_share) > 0 then
        policy.breaker_window_seconds := coalesce(policy.breaker_window_seconds, 60);
        policy.breaker_open_seconds := coalesce(policy.breaker_open_seconds, 30);
        policy.breaker_probes := coalesce(policy.breaker_probes, 1);
    elsif jsonb_strip_nulls(given) ?| array['breaker_window_seconds', 'breaker_open_seconds', 'breaker_probes', 'breaker_codes'] then
        raise exception 'a breaker needs breaker_failures or breaker_share, which say when it opens' using errcode = 'TL400';
    else
        policy.breaker_window_seconds := null;
        policy.breaker_open_seconds := null;
        policy.breaker_probes := null;
        policy.breaker_codes := null;
    end if;
    policy.rank := coalesce(policy.rank, 0);
    policy.weight := coalesce(policy.weight, 1);
    policy.audit := coalesce(policy.audit, false);
    return policy;
end
$$;
