-- Vacuum keeps pace with the queue. By default it waits until a fifth of the table is dead, and then rests after every
-- few pages: at 19,500 tasks a second, kept for a minute, dead rows grew to nine millions within five minutes, the
-- tables to 4.3 GB, and latency with them (p99 of the last minute 3.9 times that of the first). Ten times the default
-- pace, and not without rest: others use this disk too.
alter table tasklib.tasks set (
    autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_vacuum_cost_limit = 2000);
