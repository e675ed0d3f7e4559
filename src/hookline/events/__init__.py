"""What happens when: the catalogue, arguments by name, schedules, dispatch, failure policy."""
