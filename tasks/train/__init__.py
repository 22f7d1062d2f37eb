"""Training: check prepared data, start a trainer as a process, evaluate and benchmark its model.

    prepared ─► checks ─► job.json ─► launch (torchrun, Slurm, Kubernetes) ─► trainer ─► checkpoints, model/ ─► evaluate

The process that plans and watches never imports torch, and survives a trainer that hangs or is killed. A job is sent as
JSON; events are returned as lines of JSON on the standard output, among the log lines of libraries.
"""
