"""Plans and schedules as text and pictures for people."""
