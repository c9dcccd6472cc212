-- Gives a queue a row with defaults if it has none, and answers the row. However many call it at once, one of them makes the row.
--
--     select * from tasklib.ensure_task_queue('mail');
create or replace function tasklib.ensure_task_queue(name text) returns tasklib.queues
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    queue tasklib.queues;
begin
    loop
        select * into queue from tasklib.queues where queues.name = ensure_task_queue.name;
        if found then
            return queue;
        end if;
        -- Waits for another session that makes the same row. If that is rolled back, or the row is deleted, it goes round again.
        insert into tasklib.queues (name) values (ensure_task_queue.name) on conflict do nothing;
        if found then
            perform tasklib.note_transition('ensure_task_queue', null, ensure_task_queue.name, null, null, null);
        end if;
    end loop;
end
$$;
revoke all on function tasklib.ensure_task_queue(text) from public;
