-- Every number and every time has a bound, so that no value that can be stored fails who computes with it; and who could
-- use the table of attempts can use the view that has its name.

-- 1. What is beyond the bounds is brought to them. All rows are read, while others work: the constraints below are
-- checked at every change of a row, so that one that breaks them could neither be claimed nor finished. What is written
-- meanwhile by hand is met row by row: whoever cannot change a row sets it aside and says so.
update tasklib.tasks
   set timeout_seconds = least(timeout_seconds, 3153600000),
       attempt = least(attempt, 1000000000), crash_count = least(crash_count, 1000000000),
       strikes = least(strikes, 1000000000), fencing_token = least(fencing_token, 4611686018427387904),
       started_at = case when started_at > '9999-12-30 00:00:00+00' then '9999-12-30 00:00:00+00'
                         when started_at < '0001-01-02 00:00:00+00' then '0001-01-02 00:00:00+00' else started_at end,
       completed_at = case when completed_at > '9999-12-30 00:00:00+00' then '9999-12-30 00:00:00+00'
                           when completed_at < '0001-01-02 00:00:00+00' then '0001-01-02 00:00:00+00'
                           else completed_at end,
       claimed_at = case when claimed_at > '9999-12-30 00:00:00+00' then '9999-12-30 00:00:00+00'
                         when claimed_at < '0001-01-02 00:00:00+00' then '0001-01-02 00:00:00+00' else claimed_at end,
       locked_until = case when locked_until > '9999-12-30 00:00:00+00' then '9999-12-30 00:00:00+00'
                           when locked_until < '0001-01-02 00:00:00+00' then '0001-01-02 00:00:00+00'
                           else locked_until end,
       cancel_asked_at = case when cancel_asked_at > '9999-12-30 00:00:00+00' then '9999-12-30 00:00:00+00'
                              when cancel_asked_at < '0001-01-02 00:00:00+00' then '0001-01-02 00:00:00+00'
                              else cancel_asked_at end,
       resolved_at = case when resolved_at > '9999-12-30 00:00:00+00' then '9999-12-30 00:00:00+00'
                          when resolved_at < '0001-01-02 00:00:00+00' then '0001-01-02 00:00:00+00'
                          else resolved_at end
 where timeout_seconds > 3153600000 or attempt > 1000000000 or crash_count > 1000000000 or strikes > 1000000000
    or fencing_token > 4611686018427387904
    or greatest(started_at, completed_at, claimed_at, locked_until, cancel_asked_at, resolved_at)
        > '9999-12-30 00:00:00+00'
    or least(started_at, completed_at, claimed_at, locked_until, cancel_asked_at, resolved_at)
        < '0001-01-02 00:00:00+00';

-- A century, as in Python. Counters end where they could not be counted to; max_retries and retry_count are never added
-- to beyond each other, and priority is only compared. Times: what a calendar has, as with tasklib.moment. No BETWEEN: a
-- dump writes it as two comparisons, and a restore would not find it as it was made. Few words: a CHECK is read anew for
-- each statement, and its length is a cost of every claim and finish.
alter table tasklib.tasks
    drop constraint tasks_timeout_positive,
    drop constraint tasks_counts_whole,
    add constraint tasks_timeout_positive check (timeout_seconds > 0 and timeout_seconds <= 3153600000) not valid,
    add constraint tasks_counts_whole check (
        least(retry_count, max_retries, attempt, crash_count, strikes, pending_parents) >= 0
        and greatest(attempt, crash_count, strikes) <= 1000000000
        and fencing_token >= 0 and fencing_token <= 4611686018427387904) not valid,
    add constraint tasks_times_in_calendar check (
        least(started_at, completed_at, claimed_at, locked_until, cancel_asked_at, resolved_at)
            >= '0001-01-02 00:00:00+00'
        and greatest(started_at, completed_at, claimed_at, locked_until, cancel_asked_at, resolved_at)
            <= '9999-12-30 00:00:00+00') not valid;

-- 2. Rows that are only written and deleted: those that are there may stay.
alter table tasklib.attempts
    add constraint attempts_numbers_bounded check (
        attempt >= 0 and attempt <= 1000000000 and fencing_token >= 0 and fencing_token <= 4611686018427387904
        and least(started_at, finished_at) >= '0001-01-02 00:00:00+00'
        and greatest(started_at, finished_at) <= '9999-12-30 00:00:00+00') not valid;

alter table tasklib.worker_states
    add constraint worker_states_numbers_bounded check (
        pid >= 0 and processes >= 0 and tasks_running >= 0 and tasks_claimed >= 0
        and (memory_usage_mb is null or memory_usage_mb >= 0 and memory_usage_mb <= 1e15)
        and (memory_percent is null or memory_percent >= 0 and memory_percent <= 1e15)
        and (cpu_percent is null or cpu_percent >= 0 and cpu_percent <= 1e15)) not valid;

-- 3. Small tables: all of their rows are brought to the bounds. A minute's counts are far below them.
update tasklib.task_rollups
   set completed = least(greatest(completed, 0), 1000000000000), failed = least(greatest(failed, 0), 1000000000000),
       timed_out = least(greatest(timed_out, 0), 1000000000000), cancelled = least(greatest(cancelled, 0), 1000000000000),
       snoozed = least(greatest(snoozed, 0), 1000000000000),
       interrupted = least(greatest(interrupted, 0), 1000000000000),
       crashed = least(greatest(crashed, 0), 1000000000000), retried = least(greatest(retried, 0), 1000000000000),
       seconds = least(greatest(seconds, 0), 1e15), waited = least(greatest(waited, 0), 1e15)
 where least(completed, failed, timed_out, cancelled, snoozed, interrupted, crashed, retried) < 0
    or greatest(completed, failed, timed_out, cancelled, snoozed, interrupted, crashed, retried) > 1000000000000
    or least(seconds, waited) < 0 or greatest(seconds, waited) > 1e15;

update tasklib.task_rollups set durations = null where 1000000000000 < any(durations) or 0 > any(durations);
update tasklib.task_rollups set waits = null where 1000000000000 < any(waits) or 0 > any(waits);

alter table tasklib.task_rollups
    add constraint task_rollups_numbers_bounded check (
        least(completed, failed, timed_out, cancelled, snoozed, interrupted, crashed, retried) >= 0
        and greatest(completed, failed, timed_out, cancelled, snoozed, interrupted, crashed, retried) <= 1000000000000
        and least(seconds, waited) >= 0 and greatest(seconds, waited) <= 1e15
        and 0 <= all(durations) and 1000000000000 >= all(durations)
        and 0 <= all(waits) and 1000000000000 >= all(waits));

update tasklib.workers set concurrency = least(greatest(concurrency, 0), 1000000000), pid = greatest(pid, 0)
 where concurrency not between 0 and 1000000000 or pid < 0;

alter table tasklib.workers
    add constraint workers_numbers_bounded check (concurrency >= 0 and concurrency <= 1000000000 and pid >= 0);

update tasklib.elections set term = 4611686018427387904 where term > 4611686018427387904;

alter table tasklib.elections
    drop constraint elections_term_counted,
    add constraint elections_term_counted check (term >= 1 and term <= 4611686018427387904);

-- 4. The version that made task_attempts a view carried only SELECT over from the table. Workers of the version before
-- insert into it: under a role that did not own it they could finish no task any more, and ran them again and again. So
-- whatever a role may do with the table, or with a column of it, and may pass on, it may do with the view. And who could
-- read and change tasks, and so retry one, can do what `retry` does since then: it moves an attempt from one to the other.
do $$
declare
    given record;
begin
    for given in
        select 'task_attempts' as target, entry.privilege_type || entry.columns as privilege, entry.is_grantable,
               entry.grantee
          from (select acl.grantee, acl.privilege_type, acl.is_grantable, '' as columns
                  from pg_class, aclexplode(relacl) as acl
                 where pg_class.oid = 'tasklib.attempts'::regclass and acl.grantee <> relowner
                union all
                select acl.grantee, acl.privilege_type, acl.is_grantable, ' (' || quote_ident(attname) || ')'
                  from pg_attribute, aclexplode(attacl) as acl
                 where attrelid = 'tasklib.attempts'::regclass and attnum > 0 and not attisdropped) as entry
        union all
        select follows.target, follows.privilege, false, acl.grantee
          from pg_class, aclexplode(relacl) as acl
          join (values ('SELECT', 'folded_attempts', 'SELECT'), ('UPDATE', 'attempts', 'INSERT'))
            as follows (had, target, privilege) on follows.had = acl.privilege_type
         where pg_class.oid = 'tasklib.tasks'::regclass and acl.grantee <> relowner
    loop
        execute format('grant %s on tasklib.%I to %s%s', given.privilege, given.target,
                       case when given.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(given.grantee)) end,
                       case when given.is_grantable then ' with grant option' else '' end);
    end loop;
end
$$;
