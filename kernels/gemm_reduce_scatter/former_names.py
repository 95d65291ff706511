"""What the family's variants were called before main loop and schedule were parts of their names."""

FORMER_NAMES = {
    "bulk_synchronous": "bulk_synchronous:portable",
    "producer_consumer": "producer_consumer:portable",
    "fused_sequential": "fused_sequential:portable",
    "workgroup_specialized": "workgroup_specialized:portable",
    "copy_engine": "copy_engine:portable",
    "warp_specialized": "warp_specialized:sm90",
    "one_shot": "fused_sequential:portable:stream_k",
}
