"""Which options of Megatron's configs our function can have. The configs are those of the installed version; what one
of them has and this file does not name is refused, unless it has its default."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from optpipe.errors import InputError

NOT_COMPARED = "with it, losses and gradients have not been compared with Megatron's own"
_REFUSED = {
    "the schedule says what is offloaded": "cpu_offloading fine_grained_activation_offloading moe_paged_stash",
    "the schedule says what is recomputed": "num_microbatches_with_partial_activation_checkpoints",
    "its order of ops is Megatron's own": """
        overlap_moe_expert_parallel_comm hybrid_context_parallel overlap_dispatch_backward_with_experts_wgrad""",
    "weight gradients come with the schedule's W": "defer_embedding_wgrad_compute",
    "linear layers compute in the type of their parameters": "enable_autocast",
    "a captured graph has an order of its own": """
        enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_modules""",
    "weights are gathered ahead in the order of Megatron's own functions": """
        gtp_weight_remat_size expert_gtp_weight_remat_size""",
    "only Megatron's own functions call it": "grad_sync_func param_sync_func",
    "random numbers of a recomputation would be others": "use_te_rng_tracker inference_rng_tracker",
    "a step that overflows would have to run again": "moe_expert_rank_capacity_factor",
    "routes are replayed in the order of Megatron's own functions": "moe_enable_routing_replay",
    "it needs every weight gradient in autograd's own backward, and here they come with W": """
        overlap_grad_reduce use_megatron_fsdp use_custom_fsdp""",
    NOT_COMPARED: """
        fp8 fp4 fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag quant_recipe use_kitchen
        use_kitchen_attention tp_comm_overlap symmetric_ar_type moe_shared_expert_overlap mtp_standalone
        dsa_indexer_topk_freq use_inference_optimized_layers mlp_chunks_for_training overlap_param_gather
        distribute_saved_activations""",
}
REFUSED = {option: why for why, options in _REFUSED.items() for option in options.split()}

# Of these only some values are accepted; others are not compared, or count over micro-batches in Megatron's own order.
VALUES: dict[str, tuple[str, ...]] = {
    "moe_token_dispatcher_type": ("allgather", "alltoall"),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "sinkhorn", "none"),
    "transformer_impl": ("local", "transformer_engine"),
}

# All others that 0.16.1 or 0.19.2 has.
_ACCEPTED = {
    "it acts within a layer's forward and backward, or before or after a step, whatever the order of micro-batches": """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size sequence_parallel
    context_parallel_size hierarchical_context_parallel_sizes cp_comm_type expert_model_parallel_size
    expert_tensor_parallel_size pipeline_model_parallel_layout num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    fp16 bf16 params_dtype pipeline_dtype autocast_dtype perform_initialization use_cpu_initialization init_method
    output_layer_init_method init_method_std embedding_init_method embedding_init_method_std
    init_model_with_meta_device use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult
    mup_base_head_dim mup_attn_scale_power deterministic_mode disable_bf16_reduced_precision_matmul grad_scale_func
    moe_grad_scale_func mtp_grad_scale_func experimental_attention_variant_loss_scale_func no_sync_func
    finalize_model_grads_func calculate_per_token_loss variable_seq_lengths timers barrier_with_L1_time
    config_logger_dir log_max_attention_logit moe_per_layer_logging test_mode num_layers hidden_size
    num_attention_heads num_query_groups ffn_hidden_size kv_channels hidden_dropout attention_dropout
    fp32_residual_connection apply_residual_connection_post_layernorm layernorm_epsilon
    layernorm_zero_centered_gamma add_bias_linear add_qkv_bias gated_linear_unit activation_func
    activation_func_fp8_input_store glu_linear_offset activation_func_clamp_value rotary_interleaved window_size
    window_attn_skip_freq normalization qk_layernorm qk_l2_norm qk_clip qk_clip_alpha qk_clip_threshold
    attention_output_gate multi_latent_attention no_rope_freq attention_backend flash_attention_version
    softmax_scale softmax_type apply_query_key_layer_scaling attention_softmax_in_fp32 bias_activation_fusion
    masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion
    fused_single_qkv_rope use_fused_weighted_squared_relu fused_residual_rmsnorm use_transformer_engine_op_fuser
    use_te_activation_func cross_entropy_loss_fusion cross_entropy_fusion_impl gradient_accumulation_fusion
    delay_wgrad_compute async_tensor_model_parallel_allreduce clone_scatter_output_in_embedding mrope_section
    heterogeneous_block_specs hetereogenous_dist_checkpoint use_grouped_gemm_for_dense_mlp q_lora_rank kv_lora_rank
    qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent rotary_scaling_factor
    original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim mla_down_proj_fusion
    experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
    dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_kernel_backend
    dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon
    dsa_indexer_k_norm_fp32 linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups
    mamba_num_heads mamba_training_ssm_states_dtype use_mamba_mem_eff_path mtp_num_layers mtp_loss_scaling_factor
    mtp_use_repeated_layer mtp_detach_heads mtp_hybrid_override_pattern num_moe_experts moe_layer_freq
    moe_ffn_hidden_size moe_latent_size moe_shared_expert_intermediate_size moe_shared_expert_gate
    use_grouped_gemm_for_shared_expert moe_shared_expert_glu_interleave_size moe_router_topk
    moe_router_topk_limited_devices moe_router_padding_for_quantization moe_router_padding_for_fp8
    moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_score_function moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate
    moe_router_quantile_balancing_ema moe_router_force_load_balancing moe_router_force_biased moe_router_fusion
    moe_grouped_gemm moe_use_legacy_grouped_gemm moe_extended_tp moe_single_grouped_weight moe_single_grouped_bias
    moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_token_dropping moe_token_drop_policy
    moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_permute_fusion moe_apply_probs_on_input
    moe_mlp_glu_interleave_size recompute_granularity recompute_method recompute_num_layers recompute_modules
    moe_layer_recompute pipeline_model_parallel_comm_backend overlap_p2p_comm batch_p2p_comm batch_p2p_sync
    use_ring_exchange_p2p deallocate_pipeline_outputs overlap_p2p_comm_warmup_flush
    microbatch_group_size_per_vp_stage grad_reduce_in_fp32 align_param_gather use_distributed_optimizer
    num_distributed_optimizer_instances check_for_nan_in_grad check_for_large_grads bucket_size num_buckets
    pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation
    param_name_patterns_for_fp32_local_accumulation average_in_collective gradient_reduce_div_fusion
    suggested_communication_unit_size nccl_ub disable_symmetric_registration
    """,
    "of these Megatron computes options that are refused": """
    tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards""",
    "it belongs to an option that is refused or to inference, and does nothing without": """
    _cpu_offloading_context cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
    cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers offload_modules
    min_offloaded_tensor_size delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
    activation_offload_fraction fine_grained_offloading_max_inflight_offloads moe_paged_stash_page_size
    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu max_seqlen_per_dp_cp_rank
    wgrad_deferral_limit ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream
    cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps tp_comm_bulk_wgrad
    tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag
    tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
    tp_comm_bootstrap_backend fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval
    fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_output_proj fp8_dot_product_attention
    fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16
    num_layers_at_end_in_bf16 kitchen_attention_backend fp4_recipe fp4_param fp4_quantizer_factory
    disable_parameter_transpose_cache keep_fp8_transpose_cache moe_enable_deepep moe_flex_dispatcher_backend
    moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms moe_permute_fusion_into_hybridep
    moe_hybridep_pad_uneven_dispatch_inputs moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
    moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy preserve_fp32_weights
    data_parallel_sharding_strategy outer_dp_sharding_strategy fsdp_double_buffer
    fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync fsdp_manual_registration
    megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
    megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode megatron_fsdp_enable_fine_grained_param_gather
    megatron_fsdp_max_pool_double_buffer inference_cuda_graph_scope moe_pad_experts_for_cuda_graph_inference
    flash_decode batch_invariant_mode inference_sampling_seed nccl_all_reduce_for_prefill
    inference_fuse_tp_communication inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
    inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type mlp_chunks_for_prefill
    cache_mla_latents
    """,
}
ACCEPTED = frozenset(" ".join(_ACCEPTED.values()).split())


def require_supported(config: Any, name: str) -> None:
    """Raises `InputError` for the first option of a config, called `name`, that is on and not supported.

    On is what a config of Megatron's own class has not by itself, for as many ranks."""
    own = next((kind for kind in type(config).__mro__ if kind.__module__.startswith("megatron.core")), type(config))
    options = [field.name for field in fields(own)]
    ranks = getattr(config, "tensor_model_parallel_size", 1)
    sizes = {"num_layers": 1, "hidden_size": ranks, "num_attention_heads": ranks, "tensor_model_parallel_size": ranks}
    sizes["expert_tensor_parallel_size"] = getattr(config, "expert_tensor_parallel_size", None)
    plain = own(**{option: size for option, size in sizes.items() if option in options})
    for option in options:
        value, default = getattr(config, option), getattr(plain, option)
        if option in ACCEPTED or value is default or value == default:
            continue
        why = REFUSED.get(option, "what it does to a schedule is not known")
        if option in VALUES:
            found = value if isinstance(value, list) else [value]
            if set(found) <= set(VALUES[option]):
                continue
            why = f"one of {', '.join(VALUES[option])} is expected; {NOT_COMPARED}"
        raise InputError(f"{name}.{option} = {value!r}: {why}, so leave it at {default!r}")
