"""The trusted programs that stand between the trainer and bubblewrap. Standard library only; no module of ours is
imported.

    trainer ──create──> zygote (one a factory) ──fork──> keeper (one a sandbox) ──fork, exec──> bwrap (one a command)
       └────────────────exec, kill, close over a socket────────┘

Why processes of our own, and not bwrap straight from the trainer:
- A trainer holds gigabytes and hundreds of threads. Forking it is slow, its memory would show up as the command's peak,
and
  bwrap's --die-with-parent follows the *thread* that forked. The zygote and the keepers are small and have one thread.
- The work directory is a size-limited tmpfs that is mounted in the keeper's own mount namespace: a real quota on bytes
  and files, with or without root; commands of one sandbox find each other's files; the trainer reaches it through a
  directory handle. No path on the host leads there, so there is nothing to clean up: when the keeper ends, the kernel
  drops it.
- Keepers are forked ahead of the requests for them, so that what takes the kernel long (moving a process into a
  control group, above all) has been done when a sandbox is asked for.
- The zygote is the first process of its own pid namespace. When it ends (its trainer ended, however), the kernel
  kills every keeper, bwrap and command, whatever they were doing.

The zygote starts as `python3 -I -S -c "...import keeper.zygote..."`, with this folder's parent on its path: that is why
modules here import each other relatively.
"""
