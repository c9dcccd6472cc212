-- A task that is submitted by its name gets the options of its function, and every attempt keeps its traceback.

-- 1. What the decorator of each task function says. Workers write it when they start; `submit`, `submit_many` and the
-- trigger `function_defaults` read it for the options that a submit leaves out.
create table tasklib.task_functions (
    name            tasklib.task_name  not null,
    queue           tasklib.queue_name not null,
    priority        integer            not null,
    max_retries     integer            not null,
    timeout_seconds double precision,
    store_result    boolean            not null,
    on_crash        text               not null,
    seen_at         timestamptz        not null default clock_timestamp(),

    constraint task_functions_pkey primary key (name),
    constraint task_functions_retries_whole check (max_retries >= 0),
    constraint task_functions_timeout_positive check (timeout_seconds > 0 and timeout_seconds <= 3153600000),
    constraint task_functions_on_crash_known check (on_crash in ('retry', 'fail'))
);

comment on table tasklib.task_functions is 'one row is one task function, as the workers that serve it define it';
comment on column tasklib.task_functions.seen_at is 'when a worker that serves it was last seen, to the day';

-- Whoever may write its own row as a worker may write this one too.
do $$
declare
    given record;
begin
    for given in
        select acl.privilege_type, acl.is_grantable,
               case when acl.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(acl.grantee)) end as grantee
          from pg_class, aclexplode(relacl) as acl
         where pg_class.oid = 'tasklib.workers'::regclass and acl.grantee <> relowner
           and acl.privilege_type in ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    loop
        execute format('grant %s on tasklib.task_functions to %s%s', given.privilege_type, given.grantee,
                       case when given.is_grantable then ' with grant option' else '' end);
    end loop;
end
$$;

-- 2. A column that a raw INSERT leaves out is null until the trigger `function_defaults` fills it. With a default of the
-- table, nobody could tell it from the same value given on purpose. on_crash stays null: the function decides, and
-- the worker writes 'fail' into the row before the first line runs.
alter table tasklib.tasks
    alter column queue drop default,
    alter column priority drop default,
    alter column max_retries drop default,
    alter column store_result drop default,
    alter column on_crash drop default,
    alter column on_crash drop not null;

comment on column tasklib.tasks.on_crash is 'null: as its function says';

-- 3. The text of tasks.error belongs to the last attempt alone.
alter table tasklib.attempts add column error text;

comment on column tasklib.attempts.error is 'the error with its traceback';

create or replace view tasklib.folded_attempts as
select id as task_id, fencing_token, started_at, completed_at as finished_at, attempt, (completed_by).pid as worker_pid,
       false as will_retry, 'COMPLETED'::text as outcome, (completed_by).worker_id as worker_id,
       (completed_by).hostname as worker_hostname, (completed_by).process_name as worker_process_name,
       null::text as error_code, null::text as error_message, null::text as failed_reason, null::text as error
  from tasklib.tasks
 where (completed_by).worker_id is not null;

create or replace view tasklib.task_attempts as
select task_id, fencing_token, started_at, finished_at, attempt, worker_pid, will_retry, outcome, worker_id,
       worker_hostname, worker_process_name, error_code, error_message, failed_reason, error
  from tasklib.attempts
union all
select task_id, fencing_token, started_at, finished_at, attempt, worker_pid, will_retry, outcome, worker_id,
       worker_hostname, worker_process_name, error_code, error_message, failed_reason, error
  from tasklib.folded_attempts;
