"""Pure functions over plain integers: orders, memory, schedules. No module here knows of graphs."""
