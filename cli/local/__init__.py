"""The processes of `supervisord.conf` on one machine."""
