-- Rings for each of these queues, once, in order: two transactions that wait for each other's rings could not be.
create or replace function tasklib.ring_all(queues text[]) returns bigint
    language sql
    set search_path = pg_catalog, pg_temp
as $$
    select count(*) from (
        select tasklib.ring(queue) from (select distinct unnest(queues) as queue) as one_each where queue is not null
        offset 0
    ) as rung
$$;
