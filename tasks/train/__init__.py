"""Hand-off to training: what was prepared is checked, a trainer is started as a process of its own, and what came out of
it is evaluated and measured.

    prepared ─► checks ─► job.json ─► launch (torchrun, Slurm, Kubernetes) ─► trainer ─► checkpoints, model/ ─► evaluate

Torch is never imported by what plans and launches: a trainer may take a machine, hang or be killed, and the process that
watches it must survive that. The two speak by files and by lines: a job goes in as JSON, and events come out as lines of
JSON on the standard output, among whatever else libraries print there.
"""
