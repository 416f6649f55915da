"""Where KV lives: layout, shared regions, and the Mooncake transfer engine of a rank."""
