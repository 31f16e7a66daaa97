"""Default timeouts of a cluster, in seconds."""

START_S = 60.0
"""For a worker to begin: Ray starts a process, which imports NumPy and compiles its parts."""
ANSWER_S = 10.0
"""For a Ray to take a connection."""
CONNECT_S = 20.0
"""For the writer of a link to connect, or a stranger to show that it is none."""
DOUBT_S = 10.0
"""After which a run ends whose part could not send a value, though no worker has died."""
END_S = 1.0
"""For workers to end runs that were stopped."""
PING_S = 5.0
"""Between two questions whether workers live, at most."""
IDLE_S = 0.25
"""Between two looks of a worker for steps that wait for values and may do so without end."""
