-- Statements that delete what has been kept for long enough: tasks, and the audit. A trigger deletes attempts with their tasks.


-- Deletes the tasks of one page (keys after $1 and below $2) that are old enough. Ids are made from the time, so that old tasks lie
-- at one end of the primary key, and the end that grows is never read. An index on completed_at would be written at the end of
-- every task, for this statement alone. Buried tasks are kept for a person to look at, and the steps of a workflow until it is
-- deleted as a whole. A queue's own retention counts for all its finished tasks, instead of those of the daemon's
-- settings. The queues are read once, as one object, and not for each row.
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
                * case when state <> 'buried' then coalesce(
                      ((select jsonb_object_agg(name, retention_days * 86400) from tasklib.queues
                         where retention_days is not null) ->> tasks.queue)::double precision,
                      case state when 'failed' then $4::double precision else $3::double precision end) end
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
                * case when state <> 'buried' then coalesce(
                      ((select jsonb_object_agg(name, retention_days * 86400) from tasklib.queues
                         where retention_days is not null) ->> tasks.queue)::double precision,
                      case state when 'failed' then $3::double precision else $2::double precision end) end
          for update skip locked))
    returning 1
)
select count(*) from gone;


-- The shortest retention that a queue has, in seconds. Null: none has one.
-- name: shortest
select min(retention_days) * 86400 from tasklib.queues;


-- Deletes rows of the audit that are older than $1 seconds, the oldest first, at most $2 of them. Answers how many.
-- No row is locked first: that would take the right to change the audit.
-- name: prune_transitions
with gone as (
    delete from tasklib.task_transitions
     where id = any(array(
         select id from tasklib.task_transitions
          where at < (select clock_timestamp() - $1::double precision * interval '1 second')
          order by at
          limit (select $2::integer)))
    returning 1
)
select count(*) from gone;
