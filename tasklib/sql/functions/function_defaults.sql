-- Fills in the options that a raw INSERT leaves out: those of the task's function, or else its queue's, or else the library's
-- defaults. The library itself always gives all options, and says whether the task is ready. So only the WHEN clause is
-- evaluated for its rows: tasklib.submit has looked at the queue. A raw INSERT that gives everything is not looked at either. The trigger fires before `task_defaults`, because its name comes first. Security definer, so that a role that may
-- insert tasks needs no right to read the task functions.
create or replace function tasklib.function_defaults() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    said tasklib.task_functions;
    of_queue tasklib.queues;
begin
    select * into said from tasklib.task_functions where task_functions.name = new.name;
    new.queue := coalesce(new.queue, said.queue, 'default');
    select * into of_queue from tasklib.queues where queues.name = new.queue;
    if not found then
        perform tasklib.refuse_unknown_queue(new.queue);
    end if;
    new.audited := coalesce(new.audited, nullif(of_queue.audit, false));
    new.priority := coalesce(
        new.priority, case when coalesce('priority' = any(said.own), true) then said.priority end,
        of_queue.default_priority, said.priority, 0);
    new.max_retries := coalesce(
        new.max_retries, case when coalesce('max_retries' = any(said.own), true) then said.max_retries end,
        of_queue.default_max_retries, said.max_retries, 3);
    new.timeout_seconds := nullif(coalesce(
        new.timeout_seconds, case when coalesce('timeout_seconds' = any(said.own), true) then said.timeout_seconds end,
        of_queue.default_timeout_seconds, said.timeout_seconds), 'infinity');
    new.deadline_at := coalesce(new.deadline_at, new.created_at + said.deadline_seconds * interval '1 second');
    new.store_result := coalesce(new.store_result, said.store_result, true);
    new.on_crash := coalesce(new.on_crash, nullif(said.on_crash, 'retry'));
    return new;
end
$$;
revoke all on function tasklib.function_defaults() from public;

create or replace trigger function_defaults before insert on tasklib.tasks
    for each row when (
        new.ready is null or new.queue is null or new.priority is null or new.max_retries is null
        or new.store_result is null)
    execute function tasklib.function_defaults();
