// Graphile Worker as its page on performance says: 24 jobs at once, a local queue of 500, completions in batches; the
// pool has one connection more than there are jobs. Finished jobs are deleted.

import { TEXT, address, load, main, note } from './driver.mjs'

const { Logger, makeWorkerUtils, run } = await load('graphile-worker')

const CONCURRENT_JOBS = 24
const silent = new Logger(() => (level, message, meta) => {
  if (level === 'error') console.error(message, meta)
})

class GraphileWorker {
  constructor(dsn) {
    this.dsn = address(dsn)
  }

  async install() {
    const utils = await this.utils(1)
    await utils.migrate()
    await utils.release()
  }

  async open(connections) {
    this.client = await this.utils(connections)
  }

  async submit(number) {
    await this.client.addJob('async_task', { number, text: TEXT })
  }

  // A smaller number is sooner here.
  async bulk(numbers, { dueAt, priority }) {
    await this.client.addJobs(
      numbers.map((number) => ({
        identifier: 'async_task',
        payload: { number, text: TEXT },
        runAt: dueAt,
        priority: -priority
      }))
    )
  }

  async run() {
    this.runner = await run({
      preset: {
        worker: {
          connectionString: this.dsn,
          concurrentJobs: CONCURRENT_JOBS,
          maxPoolSize: CONCURRENT_JOBS + 1,
          localQueue: { size: 500 },
          completeJobBatchDelay: 0,
          failJobBatchDelay: 0
        }
      },
      logger: silent,
      noHandleSignals: true,
      crontab: '',
      taskList: { async_task: async ({ number }) => note(number) }
    })
  }

  async stop() {
    await this.runner.stop()
  }

  utils(connections) {
    return makeWorkerUtils({ connectionString: this.dsn, maxPoolSize: connections, logger: silent })
  }
}

await main((dsn) => new GraphileWorker(dsn), ['graphile-worker', 'pg'])
