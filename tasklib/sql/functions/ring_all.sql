-- Rings once for each of these queues. `offset 0` keeps the planner from leaving out the calls, whose answers are not used.
create or replace function tasklib.ring_all(queues text[]) returns bigint
    language sql
    set search_path = pg_catalog, pg_temp
as $$
    select count(*) from (
        select tasklib.ring(queue) from (select distinct unnest(queues) as queue) as one_each where queue is not null
        offset 0
    ) as rung
$$;
