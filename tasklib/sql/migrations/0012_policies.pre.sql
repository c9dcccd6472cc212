-- Queues have policies: rows that operators change while workers run. Nothing here touches the rows of tasks, so that a table of
-- any size is migrated at once: new columns are null and have no default.

-- 1. The policies. No AND begins with a BETWEEN: after a dump and a restore PostgreSQL would describe it in other words, and the
-- doctor would take the schema for changed.
create table tasklib.queues (
    name                    tasklib.queue_name not null,
    paused_at               timestamptz,
    paused_by               text,
    pause_reason            text,
    paused_until            timestamptz,
    max_running             integer,
    max_per_worker          integer,
    rate_limit              integer,
    rate_seconds            double precision,
    rate_burst              integer,
    breaker_failures        integer,
    breaker_share           double precision,
    breaker_window_seconds  double precision,
    breaker_open_seconds    double precision,
    breaker_probes          integer,
    breaker_codes           text[],
    ageing_seconds          double precision,
    rank                    integer          not null default 0,
    weight                  double precision not null default 1,
    default_priority        integer,
    default_max_retries     integer,
    default_timeout_seconds double precision,
    retention_days          double precision,
    audit                   boolean          not null default false,
    created_at              timestamptz      not null default clock_timestamp(),
    changed_at              timestamptz      not null default clock_timestamp(),
    changed_by              text,

    constraint queues_pkey primary key (name),
    constraint queues_pause_whole check (
        paused_at is not null or num_nonnulls(paused_by, pause_reason, paused_until) = 0),
    constraint queues_caps_bounded check (max_running >= 0 and max_running <= 1000000 and max_per_worker between 1 and 1000000),
    constraint queues_rate_whole check (
        num_nonnulls(rate_limit, rate_seconds) in (0, 2) and (rate_burst is null or rate_limit is not null)
        and rate_limit between 1 and 1000000000 and rate_seconds between 0.01 and 31536000
        and rate_burst between 1 and 1000000000),
    constraint queues_breaker_whole check (
        case when num_nonnulls(breaker_failures, breaker_share) = 0
             then num_nonnulls(breaker_window_seconds, breaker_open_seconds, breaker_probes, breaker_codes) = 0
             else breaker_window_seconds >= 1 and breaker_window_seconds <= 86400 and breaker_open_seconds between 2 and 86400
                  and breaker_probes between 1 and 1000 and breaker_window_seconds is not null
                  and breaker_open_seconds is not null and breaker_probes is not null end
        and breaker_failures between 1 and 1000000 and breaker_share > 0 and breaker_share <= 1),
    constraint queues_order_bounded check (
        ageing_seconds >= 1 and ageing_seconds <= 31536000 and rank between -1000 and 1000 and weight between 0.001 and 1000),
    constraint queues_defaults_bounded check (
        default_max_retries >= 0 and default_timeout_seconds > 0 and default_timeout_seconds <= 3153600000
        and retention_days > 0 and retention_days <= 36500)
);

comment on table tasklib.queues is 'one row is one queue with its policy; a queue without a row has none';
comment on column tasklib.queues.max_running is 'how many of its tasks execute at one time in the whole cluster';
comment on column tasklib.queues.rank is 'workers take tasks of a queue with a higher rank first';
comment on column tasklib.queues.weight is 'the share of a queue among those of the same rank';

-- One row for all queues. Whoever changes a policy raises `version` and holds the row until the commit, so that versions are
-- committed in their order. Workers only read it: an operator who leaves a transaction open holds up no worker.
create table tasklib.policy (
    only_row              boolean not null default true,
    version               bigint  not null default 0,
    cluster_wide_cap      integer,
    refuses_unknown_queues boolean not null default false,
    features              text[]  not null default '{}',

    constraint policy_pkey primary key (only_row),
    constraint policy_one_row check (only_row),
    constraint policy_cap_bounded check (cluster_wide_cap between 0 and 1000000)
);
insert into tasklib.policy default values;

comment on table tasklib.policy is 'the one row that holds for all queues';
comment on column tasklib.policy.features is 'what only workers that know it may run beside: see workers.features';

-- Whether submits have to look at the queues at all. Called: a queue has defaults or is audited, or unknown queues are refused, or
-- it was so once. A sequence and no column, because it is read without a query, in 0.2 us; two look-ups take 9. It is set before
-- the change is committed, and stays set, which costs a look and no more.
create sequence tasklib.submit_rules;

-- 2. What workers hold of a cap: how many tasks of a queue each may execute at once. The queue '*' stands for all queues. The sum
-- over the workers never exceeds the cap, apart from tasks that ran already when the cap was lowered.
create table tasklib.permits (
    queue     text        not null,
    worker_id text        not null,
    permits   integer     not null,
    wanted    integer     not null,
    since     timestamptz not null default clock_timestamp(),

    constraint permits_pkey primary key (queue, worker_id),
    constraint permits_whole check (permits >= 0 and wanted >= permits)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- 3. The starts that a rate limit has granted within its period: when, and how many. At most some 65 entries.
create table tasklib.rates (
    queue   text          not null,
    at      timestamptz[] not null default '{}',
    taken   integer[]     not null default '{}',
    full_at timestamptz   not null default 'epoch',

    constraint rates_pkey primary key (queue)
) with (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

comment on column tasklib.rates.full_at is 'when the whole burst is available again';

-- 4. The state of a queue's circuit breaker. `open` after `open_until` means half open: nobody has to write that.
create table tasklib.breakers (
    queue      text        not null,
    state      text        not null default 'closed',
    epoch      bigint      not null default 1,
    open_until timestamptz,
    succeeded  bigint      not null default 0,
    failed     bigint      not null default 0,
    since      timestamptz not null default clock_timestamp(),

    constraint breakers_pkey primary key (queue),
    constraint breakers_whole check (
        state in ('closed', 'open') and (open_until is not null) = (state = 'open') and least(succeeded, failed) >= 0)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

comment on column tasklib.breakers.epoch is 'raised at every turn; attempts that began in another epoch do not count';

-- 5. What operators did, and what happened to tasks whose queue asks for an audit.
create table tasklib.task_transitions (
    id      bigint      not null generated always as identity,
    at      timestamptz not null default clock_timestamp(),
    actor   text        not null,
    verb    text        not null,
    task_id uuid,
    queue   text,
    before  jsonb,
    after   jsonb,
    reason  text,

    constraint task_transitions_pkey primary key (id)
);
create index task_transitions_task on tasklib.task_transitions (task_id, id) where task_id is not null;
create index task_transitions_time on tasklib.task_transitions (at);

comment on table tasklib.task_transitions is 'one row is one audited change: by whom, of what, from what to what, and why';

-- 6. On tasks and workers: null in every row that there is.
alter table tasklib.tasks
    add column deadline_at timestamptz,  -- a domain with a CHECK would rewrite the table
    add column audited boolean;

-- The bounds that a domain would give it, in the CHECK that bounds the other times: one more CHECK would be read and compiled for
-- each statement, 3 us of a submit. Not valid, so that no row is read.
alter table tasklib.tasks
    drop constraint if exists tasks_times_in_calendar,
    add constraint tasks_times_in_calendar check (
        least(started_at, completed_at, claimed_at, locked_until, cancel_asked_at, resolved_at, deadline_at)
            >= '0001-01-02 00:00:00+00'
        and greatest(started_at, completed_at, claimed_at, locked_until, cancel_asked_at, resolved_at, deadline_at)
            <= '9999-12-30 00:00:00+00') not valid;

comment on column tasklib.tasks.deadline_at is 'the end of the time for all attempts together';
comment on column tasklib.tasks.audited is 'every change of its state is written to task_transitions';

-- Workers of earlier versions leave both null: then each option counts as the function's own.
alter table tasklib.task_functions
    add column own text[],
    add column deadline_seconds double precision,
    add constraint task_functions_deadline_positive check (deadline_seconds > 0 and deadline_seconds <= 3153600000);

comment on column tasklib.task_functions.own is 'the options that the function itself gives; a queue''s default replaces the others';

alter table tasklib.workers add column features text[] not null default '{}';

comment on column tasklib.workers.features is 'what this worker knows; a worker that lacks a feature in use is refused';

-- 7. Whoever may work as a worker may do so with policies.
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
        execute format(
            'grant %s on tasklib.queues, tasklib.policy, tasklib.permits, tasklib.rates, tasklib.breakers,
                         tasklib.task_transitions to %s%s',
            given.privilege_type, given.grantee, case when given.is_grantable then ' with grant option' else '' end);
    end loop;

    -- Whoever may change tasks may cancel and retry them, which is audited.
    for given in
        select case when acl.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(acl.grantee)) end as grantee,
               bool_or(acl.is_grantable) as is_grantable
          from pg_class
         cross join lateral (
             select relacl union all select attacl from pg_attribute where attrelid = pg_class.oid and attnum > 0
         ) as granted (acls), aclexplode(acls) as acl
         where pg_class.oid = 'tasklib.tasks'::regclass and acl.grantee <> relowner and acl.privilege_type = 'UPDATE'
         group by 1
    loop
        execute format(
            'grant insert on tasklib.task_transitions to %s%s',
            given.grantee, case when given.is_grantable then ' with grant option' else '' end);
    end loop;
end
$$;
