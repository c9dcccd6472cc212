// pg-boss for many short jobs: batches of 500, fetched again at once while they come back full, four fetchers that overlap,
// and workers that are woken by a notification. Finished jobs are kept, which is its default.

import { TEXT, address, load, main, note } from './driver.mjs'

const { PgBoss } = await load('pg-boss')

const QUEUE = 'async_task'
const WORK = {
  batchSize: 500,
  burstWhenBatchFull: true,
  localConcurrency: 4,
  pollingIntervalSeconds: 0.5
}

class Boss {
  constructor(dsn) {
    this.dsn = address(dsn)
  }

  async install() {
    const boss = await this.boss(2)
    await boss.createQueue(QUEUE, { notify: true })
    await boss.stop()
  }

  // What keeps the tables in order is the worker's business.
  async open(connections) {
    this.client = await this.boss(connections, { supervise: false, schedule: false })
  }

  async submit(number) {
    await this.client.send(QUEUE, { number, text: TEXT })
  }

  async bulk(numbers, { dueAt, priority }) {
    await this.client.insert(
      QUEUE,
      numbers.map((number) => ({ data: { number, text: TEXT }, startAfter: dueAt, priority }))
    )
  }

  async run() {
    this.client = await this.boss(10)
    await this.client.work(QUEUE, WORK, async (jobs) => {
      for (const { data } of jobs) note(data.number)
    })
  }

  async stop() {
    await this.client.stop()
  }

  async boss(connections, options = {}) {
    const boss = new PgBoss({ connectionString: this.dsn, max: connections, useListenNotify: true, ...options })
    boss.on('error', (error) => console.error(error))
    return boss.start()
  }
}

await main((dsn) => new Boss(dsn), ['pg-boss', 'pg'])
