"""The sockets: engine link, side channel and metaserver client, each with one owner."""
