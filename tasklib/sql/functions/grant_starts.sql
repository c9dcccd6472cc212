-- Grants a worker starts of a queue with a rate limit: at most rate_limit in any period of rate_seconds, and at most rate_burst at
-- once. `next_seconds` is when the next start can be granted, if some were refused. A grant is spent, whether it is used or not: to
-- give one back to the wrong entry would grant too many later.
--
-- The row's lock comes first, and the clock is read after it. A grant within 1/64 of the period of the last entry joins it *with the
-- later time*, so that there are never more than some 65 entries and no sliding window ever holds more than the limit. If the clock
-- has gone back, everything that was granted counts from now.
-- A worker may use a grant until 0.1 s after it asked for it. So an entry counts for that much longer than the period: otherwise a
-- late start and those of the next period would be too many (44 in a period of 2 s with a limit of 40, under load).
create or replace function tasklib.grant_starts(
    queue text, wants integer, out granted integer, out next_seconds double precision
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    most integer;
    period interval;
    burst integer;
    late constant interval := '0.1 second';  -- GRANT_SECONDS of the worker
    step interval;  -- how long it takes for one start of the burst to come back
    now timestamptz;
    times timestamptz[];
    counts integer[];
    full_at timestamptz;
    entries integer;
    used bigint;
    available integer;
begin
    insert into tasklib.rates (queue) values (grant_starts.queue) on conflict do nothing;
    select rate.at, rate.taken, rate.full_at into times, counts, full_at
      from tasklib.rates as rate where rate.queue = grant_starts.queue for update;
    select limits.rate_limit, limits.rate_seconds * interval '1 second', limits.rate_burst,
           limits.rate_seconds / limits.rate_limit * interval '1 second'
      into most, period, burst, step
      from tasklib.queue_limits as limits where limits.queue = grant_starts.queue;
    if most is null then
        granted := wants;
        return;
    end if;
    now := clock_timestamp();
    entries := cardinality(times);
    if entries > 0 and times[entries] > now then
        times := array[now];
        counts := array[(select sum(count) from unnest(counts) as count)];
        full_at := least(full_at, now + burst * step);
        entries := 1;
    end if;
    while entries > 0 and times[1] <= now - period - late loop
        times := times[2:];
        counts := counts[2:];
        entries := entries - 1;
    end loop;
    used := coalesce((select sum(count) from unnest(counts) as count), 0);
    full_at := greatest(full_at, now);
    available := floor(burst - extract(epoch from full_at - now) / extract(epoch from step) + 1e-6);
    granted := greatest(least(wants, most - used, available), 0);
    if granted > 0 then
        if entries > 0 and now - times[entries] < period / 64 then
            times[entries] := now;
            counts[entries] := counts[entries] + granted;
        else
            times := times || now;
            counts := counts || granted;
        end if;
        full_at := full_at + granted * step;
        update tasklib.rates as rate
           set at = times, taken = counts, full_at = full_at
         where rate.queue = grant_starts.queue;
    end if;
    if granted < wants then
        next_seconds := extract(epoch from greatest(
            case when used + granted >= most then times[1] + period + late end,
            full_at - (burst - 1) * step) - now);
        next_seconds := greatest(next_seconds, 0.001);
    end if;
end
$$;
