"""Attribution of failures to ranks, and the timely end of all ranks of a failed job."""
