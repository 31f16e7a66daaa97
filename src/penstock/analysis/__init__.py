"""Facts about graphs; nothing here changes one."""
