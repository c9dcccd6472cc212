// The driver of systems for Node: the same commands and answers, as lines of JSON, as those of driver.py, which says what
// they are. What a system needs is in the directory that is named on the command line. Times are those of the monotonic
// clock, which is one for all processes of a machine, and the one of Python's time.monotonic().

import { readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { setTimeout as sleep } from 'node:timers/promises'
import { pathToFileURL } from 'node:url'

const BULK = 1_000 // tasks in one call
export const TEXT = 'alice@example.com'
const PROGRESS_MS = 50
const began = new Map() // by the task's number: when its first line was reached
let repeated = 0 // tasks that have begun before

const environment = process.argv[2]
const required = createRequire(join(environment, 'driver.mjs'))

export const load = (name) => import(pathToFileURL(required.resolve(name)))

const monotonic = () => Number(process.hrtime.bigint()) / 1e9

// The first line of every task.
export function note(number) {
  if (began.has(number)) repeated += 1
  began.set(number, monotonic())
}

// Its parser of addresses wants the name of a host, also where the address is a socket.
export const address = (dsn) => dsn.replace('@/', '@localhost/')

function say(answer) {
  process.stdout.write(JSON.stringify(answer) + '\n')
}

function tellProgress() {
  let told = 0
  setInterval(() => {
    if (began.size !== told) say({ begun: (told = began.size) })
  }, PROGRESS_MS).unref()
}

class Driver {
  constructor(make, packages) {
    this.make = make
    this.packages = packages
  }

  versions() {
    const version = (name) => JSON.parse(readFileSync(join(environment, 'node_modules', name, 'package.json'))).version
    return { ...Object.fromEntries(this.packages.map((name) => [name, version(name)])), node: process.versions.node }
  }

  async setup({ dsn }) {
    await this.make(dsn).install()
    return {}
  }

  async open({ dsn, connections = 1 }) {
    this.system = this.make(dsn)
    await this.system.open(connections)
    return {}
  }

  async submit({ count, concurrency }) {
    await this.submits(5 * concurrency, concurrency)
    return { seconds: await this.submits(count, concurrency) }
  }

  async submits(count, concurrency) {
    let number = 0
    const submitOn = async () => {
      while (number < count) await this.system.submit(number++)
    }
    const start = monotonic()
    await Promise.all(Array.from({ length: concurrency }, submitOn))
    return monotonic() - start
  }

  async bulk({ count, delay_seconds: delaySeconds = 0, priority = 0 }) {
    const start = monotonic()
    for (let at = 0; at < count; at += BULK) {
      const numbers = Array.from({ length: Math.min(BULK, count - at) }, (_, index) => at + index)
      const dueAt = delaySeconds ? new Date(Date.now() + delaySeconds * 1_000) : undefined
      await this.system.bulk(numbers, { dueAt, priority })
    }
    return { seconds: monotonic() - start }
  }

  async pace({ count, pause }) {
    const submitted = []
    for (let number = 0; number < count; number++) {
      await sleep(pause * 1_000)
      submitted.push(monotonic())
      await this.system.submit(number)
    }
    return { submitted }
  }

  async work({ dsn }) {
    began.clear()
    repeated = 0
    this.system = this.make(dsn)
    tellProgress()
    await this.system.run()
    return {}
  }

  async stop() {
    await this.system.stop()
    return { began: Object.fromEntries(began), repeated }
  }
}

// A system that fails takes the process with it: nobody would notice otherwise.
process.on('unhandledRejection', (error) => {
  throw error
})

export async function main(make, packages) {
  const driver = new Driver(make, packages)
  for await (const line of createInterface({ input: process.stdin })) {
    const { do: command, ...given } = JSON.parse(line)
    say(await driver[command](given))
  }
  process.exit()
}
