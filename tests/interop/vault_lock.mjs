// A second implementation of the path lock, for the tests: written after the protocol document.
//
// Nothing here is shared with the Python implementation but the document. It writes *shared* records (v, pid, token,
// created_at and nothing else), prepares its lock beside the file, and has only what Node.js offers: no renameat2, so a
// plain rename(2), which fails with ENOTEMPTY on a complete lock; no *at calls, so /proc/self/fd/N/NAME stands in for
// them.
//
//   node vault_lock.mjs count FILE ROUNDS [GO]   ROUNDS critical sections: read the number in FILE, add one, write it;
//                                                begins when the file GO exists
//   node vault_lock.mjs hold FILE                takes the lock, says "locked", waits for a line, releases, says how
//   node vault_lock.mjs try FILE [MILLISECONDS]  says "locked" (and releases) or "busy"
//   node vault_lock.mjs judge FILE               says what it thinks of the lock that stands: free, dead, alive, unknown,
//                                                residue or foreign

import fs from "node:fs";
import path from "node:path";
import crypto from "node:crypto";
import readline from "node:readline";

const OWNER = ".owner.json";
const LEASE = ".lease-";
const STALE = 10_000; // milliseconds
const POLL = 10;
const GAP = 2; // between two locks of the same path
const OWNER_LIMIT = 64 * 1024;
const SCRAP = /^\.owner\.json\.(\d+)\.\d+\.[0-9A-Za-z-]+\.tmp$/;
const { O_RDONLY, O_DIRECTORY, O_NOFOLLOW, O_NONBLOCK } = fs.constants;

const sleepCell = new Int32Array(new SharedArrayBuffer(4));
const sleep = (milliseconds) => Atomics.wait(sleepCell, 0, 0, Math.max(0, milliseconds));
const monotonic = () => Number(process.hrtime.bigint() / 1000n) / 1000;

const here = {
  boot_id: fs.readFileSync("/proc/sys/kernel/random/boot_id", "ascii").trim(),
  pid_ns: fs.statSync("/proc/self/ns/pid").ino,
  time_ns: fs.statSync("/proc/self/ns/time").ino,
};

const absent = (call, ...codes) => {
  try {
    return call();
  } catch (error) {
    if (error.code === "ENOENT" || codes.includes(error.code)) return undefined;
    if (error.errno === -116) return undefined; // ESTALE, as network file systems say it of what is gone
    throw error;
  }
};

// --- looking

function startTime(pid) {
  const text = absent(() => fs.readFileSync(`/proc/${pid}/stat`, "latin1"), "ESRCH", "EACCES");
  return text === undefined ? undefined : Number(text.slice(text.lastIndexOf(")") + 2).split(" ")[19]);
}

function isZombie(pid) {
  const state = (file) => {
    const text = absent(() => fs.readFileSync(file, "latin1"), "ESRCH", "EACCES");
    return text === undefined ? undefined : text.slice(text.lastIndexOf(")") + 2)[0];
  };
  if (!["Z", "X"].includes(state(`/proc/${pid}/stat`))) return false;
  const threads = absent(() => fs.readdirSync(`/proc/${pid}/task`), "ESRCH", "EACCES") ?? [];
  return threads.length > 0 && threads.every((thread) => ["Z", "X"].includes(state(`/proc/${pid}/task/${thread}/stat`)));
}

/** false only for ESRCH: nothing else proves that there is no such process */
function exists(pid) {
  try {
    process.kill(pid, 0);
  } catch (error) {
    if (error.code === "ESRCH") return false;
    if (error.code !== "EPERM") return undefined;
  }
  return true;
}

/** Everything the directory behind `fd` says: { owner, raw, leases, scraps, foreign, mtime } */
function look(fd) {
  const inside = (name) => `/proc/self/fd/${fd}/${name}`;
  const status = fs.fstatSync(fd, { bigint: true });
  const found = { dev: status.dev, ino: status.ino, mtime: status.mtimeNs, leases: [], scraps: [] };
  const names = fs.readdirSync(inside(""));
  for (const name of names) {
    const scrap = SCRAP.exec(name);
    if (name !== OWNER && !name.startsWith(LEASE) && !scrap) {
      found.foreign = `holds ${JSON.stringify(name)}`;
      continue;
    }
    const entry = absent(() => fs.lstatSync(inside(name)));
    if (entry === undefined) continue; // released under our look
    if (!entry.isFile() || (name === OWNER && entry.size > OWNER_LIMIT)) {
      found.foreign = `its ${name} is no small regular file`;
    } else if (scrap) found.scraps.push({ name, pid: Number(scrap[1]) });
    else if (name !== OWNER) found.leases.push(name);
    else {
      const file = absent(() => fs.openSync(inside(name), O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
      if (file === undefined) continue;
      try {
        const now = fs.fstatSync(file);
        if (!now.isFile() || now.size > OWNER_LIMIT) found.foreign = "its owner is no small regular file";
        else found.raw = fs.readFileSync(file, "utf8");
      } finally {
        fs.closeSync(file);
      }
    }
  }
  if (found.raw !== undefined) {
    try {
      const record = JSON.parse(found.raw);
      if (record !== null && typeof record === "object" && !Array.isArray(record)) {
        if (Number.isInteger(record.v) && record.v !== 1) found.otherVersion = record.v;
        else if (
          record.v === 1 &&
          Number.isSafeInteger(record.pid) &&
          record.pid > 0 &&
          typeof record.token === "string" &&
          record.token !== "" &&
          !record.token.includes("/")
        ) {
          found.owner = record;
        }
      }
    } catch {
      // not JSON: an owner that cannot be parsed, which the table has a row for
    }
  }
  return found;
}

/** The table of the document. `first` is the first look at this very lock: { found, at (monotonic ms), boot (s) } */
function judge(found, first) {
  const age = Date.now() - Number(found.mtime / 1_000_000n);
  const stale = age > STALE;
  const twice = monotonic() - first.at > 20 && first.found.mtime === found.mtime && first.found.raw === found.raw;
  if (found.foreign) return "foreign";
  if (found.otherVersion !== undefined) return "unknown";
  if (!found.owner) {
    if (found.leases.length > 0) return "unknown";
    if (found.scraps.some((scrap) => exists(scrap.pid) !== false)) return "unknown";
    return stale && twice ? "residue" : "unknown";
  }
  const owner = found.owner;
  const plain = ["host", "boot_id", "start_time", "pid_ns", "time_ns"].every((key) => owner[key] === undefined);
  let verdict;
  if (plain) {
    const there = exists(owner.pid);
    if (there === undefined) return "unknown";
    if (there && !isZombie(owner.pid)) {
      const started = startTime(owner.pid);
      if (started === undefined || started / 100 <= first.boot + 0.02) return "alive";
    }
    verdict = stale ? "dead" : "unknown";
  } else {
    // A boot id is drawn at random at each start of a kernel: the same one is the same host.
    if (owner.boot_id !== here.boot_id || owner.pid_ns !== here.pid_ns) return "unknown";
    if (owner.time_ns !== here.time_ns) return "unknown";
    const there = exists(owner.pid);
    if (there === undefined) return "unknown";
    const started = there ? startTime(owner.pid) : undefined;
    const another = started !== undefined && owner.start_time !== undefined && started !== owner.start_time;
    verdict = !there || another || isZombie(owner.pid) ? "dead" : "alive";
  }
  if (verdict === "dead" && !found.leases.includes(LEASE + owner.token)) {
    if (found.leases.length > 0 || !twice) return "unknown";
  }
  return verdict;
}

// --- taking apart: through one descriptor; only the last step uses the name

function sameDirectory(lock, dev, ino) {
  const status = absent(() => fs.lstatSync(lock, { bigint: true }), "ENOTDIR");
  return status !== undefined && status.dev === dev && status.ino === ino;
}

function unlink(file) {
  return absent(() => (fs.unlinkSync(file), true)) ?? false;
}

/** "removed", "lost" (somebody else's business by now) or "left" */
function takeApart(lock, fd, lease, found) {
  const inside = (name) => `/proc/self/fd/${fd}/${name}`;
  if (!sameDirectory(lock, found.dev, found.ino)) return "lost";
  if (lease !== undefined && !unlink(inside(lease))) return "lost";
  if (found.raw !== undefined && !unlink(inside(OWNER)) && lease === undefined) return "lost";
  for (const scrap of found.scraps ?? []) unlink(inside(scrap.name));
  // It is decided: whoever takes the name from here on, also over our empty directory, is a successor.
  if (!sameDirectory(lock, found.dev, found.ino)) return "removed";
  try {
    fs.rmdirSync(lock);
  } catch (error) {
    if (error.code === "ENOENT") return "removed"; // by somebody else
    if (error.code === "ENOTEMPTY" || error.code === "EEXIST" || error.code === "ENOTDIR") {
      return sameDirectory(lock, found.dev, found.ino) ? "left" : "removed";
    }
    throw error;
  }
  return "removed";
}

// --- acquiring and releasing

const lastRelease = new Map();

function put(lock) {
  const token = crypto.randomUUID();
  const pending = `${lock}.${process.pid}.${token}.pending`;
  fs.mkdirSync(pending, 0o750);
  const record = { v: 1, pid: process.pid, token, created_at: new Date().toISOString() };
  fs.writeFileSync(path.join(pending, OWNER), JSON.stringify(record) + "\n", { flag: "wx", mode: 0o640 });
  fs.writeFileSync(path.join(pending, LEASE + token), token + "\n", { flag: "wx", mode: 0o640 });
  const fd = fs.openSync(pending, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  try {
    const now = new Date();
    fs.utimesSync(pending, now, now);
    fs.renameSync(pending, lock);
  } catch (error) {
    fs.closeSync(fd);
    unlink(path.join(pending, LEASE + token));
    unlink(path.join(pending, OWNER));
    fs.rmdirSync(pending);
    if (error.code === "EEXIST" || error.code === "ENOTEMPTY") return undefined;
    throw error;
  }
  const status = fs.fstatSync(fd, { bigint: true });
  return { lock, token, fd, dev: status.dev, ino: status.ino };
}

/** The lock of `file`, or undefined if it is busy until `timeout` milliseconds have passed. */
export function acquire(file, timeout = 5000) {
  const lock = file + ".lock";
  sleep((lastRelease.get(lock) ?? 0) + GAP - monotonic());
  const deadline = monotonic() + timeout;
  let first;
  for (;;) {
    const fd = absent(() => fs.openSync(lock, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    if (fd === undefined) {
      const held = put(lock);
      if (held !== undefined) return held;
    } else {
      try {
        const found = absent(() => look(fd));
        if (found !== undefined) {
          const same = first !== undefined && first.found.ino === found.ino && first.found.owner?.token === found.owner?.token;
          if (!same) first = { found, at: monotonic(), boot: Number(fs.readFileSync("/proc/uptime", "ascii").split(" ")[0]) };
          const verdict = judge(found, first);
          if (verdict === "foreign") throw new Error(`${lock} is no lock: ${found.foreign}`);
          if (verdict === "dead" || verdict === "residue") {
            const lease = found.owner && found.leases.includes(LEASE + found.owner.token) ? LEASE + found.owner.token : undefined;
            if (takeApart(lock, fd, lease, found) !== "left") continue;
          }
        }
      } finally {
        fs.closeSync(fd);
      }
    }
    const left = deadline - monotonic();
    if (left <= 0) return undefined;
    sleep(Math.min(POLL, left));
  }
}

/** "removed", or "lost" if the lock was not ours any more (then it is left alone). */
export function release(held) {
  try {
    return takeApart(held.lock, held.fd, LEASE + held.token, { dev: held.dev, ino: held.ino, raw: "" });
  } finally {
    fs.closeSync(held.fd);
    lastRelease.set(held.lock, monotonic());
  }
}

// --- the command line

const [command, file, argument, go] = process.argv.slice(2);
if (command === "count") {
  while (go !== undefined && !fs.existsSync(go)) sleep(5);
  for (let round = 0; round < Number(argument); round++) {
    const held = acquire(file, 100_000);
    if (held === undefined) throw new Error("busy for ever");
    fs.writeFileSync(file, String(Number(fs.readFileSync(file, "ascii")) + 1));
    const how = release(held);
    if (how !== "removed") throw new Error(`release: ${how}`);
  }
} else if (command === "hold") {
  const held = acquire(file);
  if (held === undefined) throw new Error("busy");
  console.log("locked");
  for await (const _ of readline.createInterface({ input: process.stdin })) break;
  console.log(release(held));
  process.exit(0);
} else if (command === "try") {
  const held = acquire(file, Number(argument ?? 0));
  console.log(held === undefined ? "busy" : "locked");
  if (held !== undefined) release(held);
} else if (command === "judge") {
  const fd = absent(() => fs.openSync(file + ".lock", O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  if (fd === undefined) console.log("free");
  else {
    const first = { found: look(fd), at: monotonic(), boot: Number(fs.readFileSync("/proc/uptime", "ascii").split(" ")[0]) };
    sleep(30);
    console.log(judge(look(fd), first));
  }
} else if (command !== undefined) {
  console.error(`unknown command ${command}`);
  process.exit(2);
}
