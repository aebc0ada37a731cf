"""The fleet at a glance, for the dashboard and `lorafleet top`."""
