-- Statements that delete what has been kept for long enough. The attempts go with their tasks, by a trigger.


-- One page of tasks, by key after $1 and below $2, and those of it that are old enough go. Ids are made from the time,
-- so what may be old lies at one end, and the end of the index that grows is never read. An index on completed_at would
-- be written by every finish of every task, for this alone. Buried tasks stay for a person to look at, and the steps of
-- a workflow until it goes as a whole.
-- A row that somebody holds is left for the next time. Whether it is old is asked where it is locked, which looks again
-- at what was changed meanwhile: a person may just have retried it. By ctid, so that each is looked up once.
-- Answers the last key of the page (null: there is no more), and how many went.
-- name: prune
with page as materialized (
    select id from tasklib.tasks
     where id > $1::uuid and id < $2::uuid
     order by id limit (select $5::integer)
), gone as (
    delete from tasklib.tasks
     where ctid = any(array(
         select ctid from tasklib.tasks
          where id = any(array(select id from page)) and workflow_id is null
            and completed_at < clock_timestamp() - interval '1 second'
                * case when state in ('completed', 'cancelled', 'expired') then $3::double precision
                       when state = 'failed' then $4::double precision end
          for update skip locked))
    returning 1
)
select (select id from page order by id desc limit 1), (select count(*) from gone);


-- The keys of a page, and those of them that are old enough by key: for when PostgreSQL refuses to delete one of them,
-- because a table of the user's refers to it, for instance.
-- name: page
select id from tasklib.tasks where id > $1::uuid and id < $2::uuid order by id limit (select $3::integer);


-- name: prune_given
with gone as (
    delete from tasklib.tasks
     where ctid = any(array(
         select ctid from tasklib.tasks
          where id = any($1::uuid[]) and workflow_id is null
            and completed_at < clock_timestamp() - interval '1 second'
                * case when state in ('completed', 'cancelled', 'expired') then $2::double precision
                       when state = 'failed' then $3::double precision end
          for update skip locked))
    returning 1
)
select count(*) from gone;
