-- Statements that delete tasks that have been kept for long enough. A trigger deletes their attempts with them.


-- Deletes the tasks of one page (keys after $1 and below $2) that are old enough. Ids are made from the time, so that old tasks lie
-- at one end of the primary key, and the end that grows is never read. An index on completed_at would be written at the end of
-- every task, for this statement alone. Buried tasks are kept for a person to look at, and the steps of a workflow until it is
-- deleted as a whole.
-- A locked row is left for the next time. The age is checked where the row is locked, because PostgreSQL then looks at its latest
-- version: a person may just have retried the task. By ctid, so that each row is looked up once.
-- Answers the last key of the page (null: the page is empty), and how many tasks were deleted.
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


-- The keys of a page. `prune_given` deletes by key. These two are used when PostgreSQL refuses to delete one of the tasks, for
-- instance because a table of the application refers to it.
-- name: page
select id from tasklib.tasks where id > $1::uuid and id < $2::uuid order by id limit (select $3::integer);


-- Deletes those of these tasks that are old enough.
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
