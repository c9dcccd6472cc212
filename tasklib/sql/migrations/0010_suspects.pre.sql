-- Suspects have an index of their own, so that workers find them beside any backlog. It is nearly always empty, and
-- updates of other rows do not touch it.
create index tasks_suspects on tasklib.tasks (priority desc, created_at, id) where ready and suspect;
