"""Default timeouts and intervals of a cluster, in seconds."""

START_S = 60.0
"""For a worker to start: Ray starts a process, which imports NumPy and compiles its parts."""
ANSWER_S = 10.0
"""For a Ray cluster to accept a connection."""
CONNECT_S = 20.0
"""For the writer of a link to connect and to send the secret."""
DOUBT_S = 10.0
"""Until a run ends whose part could not send a value, although no worker was reported dead."""
END_S = 1.0
"""For workers to end runs that were stopped."""
PING_S = 5.0
"""The maximum interval of checks whether workers are alive."""
IDLE_S = 0.25
"""The interval at which a worker looks for steps that wait for values, perhaps forever."""
