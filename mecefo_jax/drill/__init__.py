"""Drills: real runs whose processes are killed by a schedule, with an account of what each death cost."""
