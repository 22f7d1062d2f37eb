"""The flows, one file each: wiring that reads as prose from top to bottom. What they call lives in `tasks`."""
